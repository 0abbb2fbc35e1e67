"""Answers of /v1/responses: one object, streamed as named and numbered events or whole.

Owns: the response object, the order of events. Must not know: shapes of items, sockets, jobs, how a
request was read.

    response.created, response.in_progress,
    (output_item.added, content_part.added, …delta…, …done, content_part.done, output_item.done)…,
    one of response.completed, response.incomplete, response.failed

Function calls have no content_part.
"""

from __future__ import annotations

import json
from typing import Any

from ..runtime.events import Event
from .answer import Choice, slowest, timings, usage
from .errors import SERVER_FAULT, ApiError
from .logprobs import ChatLogprobs
from .parts import CallPiece, Run, begins_run
from .reply import Json, Reply
from .responses_items import Item
from .sse import MEDIA_TYPE, PING, frame, named_sse


class ResponsesWriter:
    media_type, ping = MEDIA_TYPE, PING

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        [self._choice] = reply.choices
        self._sequence = 0
        self._open_item: Item | None = None
        self._n_items = 0
        self._frame = ("", "")
        has_logprobs = reply.request.n_logprobs is not None
        self._logprobs = ChatLogprobs(reply.tokenizer) if has_logprobs else None
        self._n_told = 0
        """Tokens whose logprobs went with a delta."""

    def start(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, index: int, event: Event) -> str:
        text = ""
        for part in self._choice.add(event):
            item = self._open_item
            if begins_run(item.run.kind if item else None, part):
                text += self._close("completed") + self._open(self._choice.runs[self._n_items])
            piece = part[1]
            text += self._delta(piece.arguments if isinstance(piece, CallPiece) else piece)
        return text

    def end(self) -> str:
        opened = "" if self._open_item else self._open(Run("text"))
        status = self._status()
        closed = self._close(status)
        response = self._response(status, self._items(status))
        return opened + closed + self._event(f"response.{status}", response=response)

    def error(self, error: ApiError) -> str:
        response = self._response("failed", self._items("incomplete"))
        response["error"] = {"code": SERVER_FAULT, "message": error.text}
        return self._event("response.failed", response=response)

    def body(self) -> Json:
        status = self._status()
        return self._response(status, self._items(status))

    def _status(self) -> str:
        end = self._choice.finish
        return "incomplete" if end and end.reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return named_sse({"type": kind, **fields, "sequence_number": self._sequence - 1})

    def _open(self, run: Run) -> str:
        item = self._open_item = self._item(run, self._n_items)
        self._n_items += 1
        self._n_told = run.first
        delta = {"type": f"{item.kind.events}.delta", **item.place, **item.with_logprobs([])}
        # The number of the event comes behind the text, where the frame was cut open.
        before, after = frame(named_sse({**delta, "delta": ""}))
        self._frame = (before, after.removesuffix("}\n\n"))
        added = self._event(
            "response.output_item.added",
            output_index=item.place["output_index"],
            item=item.begun(),
        )
        if not item.kind.part:
            return added
        return added + self._event(
            "response.content_part.added", **item.place, part=item.part("", [])
        )

    def _delta(self, text: str) -> str:
        item = self._open_item
        assert item is not None
        if not text:
            return ""
        if item.kind.has_logprobs and self._logprobs:
            tokens = self._choice.tokens[self._n_told :]
            self._n_told = len(self._choice.tokens)
            written = self._logprobs.write(tokens)["content"]
            fields = {**item.place, "delta": text, "logprobs": written}
            return self._event(f"{item.kind.events}.delta", **fields)
        before, after = self._frame
        self._sequence += 1
        number = f',"sequence_number":{self._sequence - 1}'
        return before + json.dumps(text) + after + number + "}\n\n"

    def _close(self, status: str) -> str:
        item = self._open_item
        if item is None:
            return ""
        self._open_item = None
        run, logprobs = item.run, self._written(item)
        text = self._event(f"{item.kind.events}.done", **item.place, **item.done(logprobs))
        if item.kind.part:
            part = item.part(run.text, logprobs)
            text += self._event("response.content_part.done", **item.place, part=part)
        return text + self._event(
            "response.output_item.done",
            output_index=item.place["output_index"],
            item=item.written(logprobs, status),
        )

    def _item(self, run: Run, index: int) -> Item:
        return Item(run, index, self._reply.id)

    def _written(self, item: Item) -> list[Json]:
        """Logprobs of the item's tokens, where it has them."""
        if not self._logprobs or not item.kind.has_logprobs:
            return []
        written: list[Json] = self._logprobs.write(self._choice.tokens_of(item.run))["content"]
        return written

    def _items(self, status: str) -> list[Json]:
        """status: of the last one; those before it were ended by the next."""
        items = [self._item(run, nth) for nth, run in enumerate(self._choice.runs or [Run("text")])]
        return [
            item.written(self._written(item), status if item is items[-1] else "completed")
            for item in items
        ]

    def _response(self, status: str, output: list[Json]) -> Json:
        request, end = self._reply.request, slowest(self._reply.choices)
        is_cut = status == "incomplete"
        return {
            "id": self._reply.id,
            "object": "response",
            "created_at": int(self._reply.created),
            "status": status,
            "model": self._reply.model,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": "flex" if request.service == "background" else "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _format(request)},
            "tool_choice": request.tool_choice_given,
            "tools": [tool.model_dump() for tool in request.tools],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(self._choice) if end else None,
            "timings": timings(end) if end else None,
        }


def _format(request: Any) -> Json:
    given = request.text.format
    return given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}


def _usage(choice: Choice) -> Json:
    counts = usage([choice])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
