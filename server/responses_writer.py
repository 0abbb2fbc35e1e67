"""Answers of /v1/responses: one object, streamed as named and numbered events or whole.

Owns: the shape of the response object, its items and events. Must not know: sockets, jobs, how a
request was read.

    response.created, response.in_progress,
    (output_item.added, content_part.added, …delta…, …done, content_part.done, output_item.done)…,
    one of response.completed, response.incomplete, response.failed
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ..runtime.events import Event, TokenEvent
from .answer import Choice, slowest, timings, usage
from .errors import SERVER_FAULT, ApiError
from .logprobs import ChatLogprobs
from .reply import Json, Reply
from .sse import MEDIA_TYPE, PING, frame, named_sse


class Kind(NamedTuple):
    """A kind of output item with one part of text."""

    id_prefix: str
    item: Json
    part: Json
    events: str
    text: Callable[[Choice], str]


REASONING = Kind(
    id_prefix="rs_",
    item={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text"},
    events="response.reasoning_text",
    text=lambda choice: choice.reasoning,
)
MESSAGE = Kind(
    id_prefix="msg_",
    item={"type": "message", "role": "assistant"},
    part={"type": "output_text", "annotations": []},
    events="response.output_text",
    text=lambda choice: choice.text,
)


class ResponsesWriter:
    media_type, ping = MEDIA_TYPE, PING

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        [self._choice] = reply.choices
        self._sequence = 0
        self._kinds: list[Kind] = []
        """Of the items so far; the last one is open."""
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
        for is_reasoning, piece in self._choice.add_text(event):
            text += self._open(REASONING if is_reasoning else MESSAGE)
            text += self._delta(piece)
        return text

    def end(self) -> str:
        opened = "" if self._kinds else self._open(MESSAGE)
        status = self._status()
        response = self._response(status, self._items(status))
        return opened + self._close(status) + self._event(f"response.{status}", response=response)

    def error(self, error: ApiError) -> str:
        response = self._response("failed", self._items("incomplete"))
        response["error"] = {"code": SERVER_FAULT, "message": error.text}
        return self._event("response.failed", response=response)

    def body(self) -> Json:
        choice, status = self._choice, self._status()
        reasons = [REASONING] if choice.reasoning else []
        self._kinds = [*reasons, *([MESSAGE] if choice.text or not reasons else [])]
        return self._response(status, self._items(status))

    def _status(self) -> str:
        end = self._choice.finish
        return "incomplete" if end and end.reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return named_sse({"type": kind, **fields, "sequence_number": self._sequence - 1})

    def _place(self) -> Json:
        """Where the open part is."""
        index = len(self._kinds) - 1
        return {"item_id": self._id(self._kinds[-1]), "output_index": index, "content_index": 0}

    def _id(self, kind: Kind) -> str:
        return kind.id_prefix + self._reply.id.removeprefix("resp_")

    def _open(self, kind: Kind) -> str:
        if self._kinds and self._kinds[-1] is kind:
            return ""
        closed = self._close("completed") if self._kinds else ""
        self._kinds.append(kind)
        place = self._place()
        item = {"id": place["item_id"], **kind.item, "content": [], "status": "in_progress"}
        delta = {"type": f"{kind.events}.delta", **place, **self._with_logprobs(kind, [])}
        # The number of the event comes behind the text, where the frame was cut open.
        before, after = frame(named_sse({**delta, "delta": ""}))
        self._frame = (before, after.removesuffix("}\n\n"))
        return (
            closed
            + self._event(
                "response.output_item.added", output_index=place["output_index"], item=item
            )
            + self._event("response.content_part.added", **place, part=self._part(kind, "", []))
        )

    def _delta(self, text: str) -> str:
        kind = self._kinds[-1]
        if kind is MESSAGE and self._logprobs:
            written = self._written(self._n_told)
            self._n_told = len(self._choice.tokens)
            fields = {**self._place(), "delta": text, "logprobs": written}
            return self._event(f"{kind.events}.delta", **fields)
        before, after = self._frame
        self._sequence += 1
        number = f',"sequence_number":{self._sequence - 1}'
        return before + json.dumps(text) + after + number + "}\n\n"

    def _close(self, status: str) -> str:
        kind, place = self._kinds[-1], self._place()
        text, logprobs = kind.text(self._choice), self._written(0)
        done = {"text": text, **self._with_logprobs(kind, logprobs)}
        return (
            self._event(f"{kind.events}.done", **place, **done)
            + self._event(
                "response.content_part.done", **place, part=self._part(kind, text, logprobs)
            )
            + self._event(
                "response.output_item.done",
                output_index=place["output_index"],
                item=self._item(kind, status),
            )
        )

    def _written(self, start: int) -> list[Json]:
        """Logprobs of the answer's tokens from `start` on; none of its reasoning's."""
        if not self._logprobs:
            return []
        choice = self._choice
        tokens: list[TokenEvent] = choice.tokens[max(start, choice.answer_from) :]
        written: list[Json] = self._logprobs.write(tokens)["content"]
        return written

    def _with_logprobs(self, kind: Kind, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs} if kind is MESSAGE else {}

    def _part(self, kind: Kind, text: str, logprobs: list[Json]) -> Json:
        return {**kind.part, "text": text, **self._with_logprobs(kind, logprobs)}

    def _item(self, kind: Kind, status: str) -> Json:
        part = self._part(kind, kind.text(self._choice), self._written(0))
        return {"id": self._id(kind), **kind.item, "content": [part], "status": status}

    def _items(self, status: str) -> list[Json]:
        """status: of the last one; those before it were ended by the next."""
        before = [self._item(kind, "completed") for kind in self._kinds[:-1]]
        return [*before, *[self._item(kind, status) for kind in self._kinds[-1:]]]

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": "flex" if request.service == "background" else "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _format(request)},
            "tool_choice": "auto",
            "tools": [],
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
