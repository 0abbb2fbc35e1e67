"""Answers in Ollama's dialect: one JSON object per line, the last one with counts and durations.

Owns: the shapes of /api/chat and /api/generate. Must not know: sockets, jobs, how a request was
read. Durations are nanoseconds. An empty piece is the sign of life: every client appends it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ..runtime.events import Event, FinishEvent, TokenEvent
from .answer import Choice
from .errors import ApiError, ollama_shape
from .logprobs import ChatLogprobs
from .parts import CallPiece
from .reply import Json, Reply
from .sse import frame, to_json

NS_PER_MS = 1_000_000

Piece = Callable[[str, str], Json]
"""Some text and some thinking, as a part of an object."""


def chat_piece(text: str, thinking: str) -> Json:
    message = {"role": "assistant", "content": text}
    return {"message": {**message, "thinking": thinking} if thinking else message}


def generate_piece(text: str, thinking: str) -> Json:
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class OllamaWriter:
    media_type = "application/x-ndjson"

    def __init__(self, piece: Piece, reply: Reply) -> None:
        self._piece = piece
        self._choice = reply.choices[0] if reply.choices else None
        self._head = {"model": reply.model, "created_at": rfc3339(reply.created)}
        has_logprobs = reply.request.n_logprobs is not None
        self._logprobs = ChatLogprobs(reply.tokenizer) if has_logprobs else None
        self._held: list[TokenEvent] = []
        self.ping = self._line(piece("", ""))
        self._frame = frame(self.ping)

    def start(self) -> str:
        return ""

    def event(self, index: int, event: Event) -> str:
        assert self._choice is not None
        if self._logprobs and isinstance(event, TokenEvent):
            self._held.append(event)
        written = ""
        for is_reasoning, piece in self._choice.add(event):
            if isinstance(piece, CallPiece):
                continue  # calls are shown whole
            written += self._line(self._piece("", piece)) if is_reasoning else self._text(piece)
        calls = whole_calls(self._choice) if self._choice.finish else []
        if calls:
            message = {"role": "assistant", "content": "", "tool_calls": calls}
            written += self._line({"message": message})
        return written

    def _text(self, text: str) -> str:
        if self._logprobs:
            return self._line(self._piece(text, ""))
        before, after = self._frame
        return before + json.dumps(text) + after

    def end(self) -> str:
        last = {**self._piece("", ""), **done(self._choice), **self._written_logprobs(self._held)}
        return to_json({**self._head, **last}) + "\n"

    def error(self, error: ApiError) -> str:
        return to_json(ollama_shape(error)) + "\n"

    def body(self) -> Json:
        choice = self._choice
        piece = self._piece(choice.text, choice.reasoning) if choice else self._piece("", "")
        if choice and (calls := whole_calls(choice)):
            piece["message"]["tool_calls"] = calls
        logprobs = self._written_logprobs(choice.tokens) if choice else {}
        return {**self._head, **piece, **done(choice), **logprobs}

    def _line(self, piece: Json) -> str:
        logprobs = self._written_logprobs(self._held)
        self._held = []
        return to_json({**self._head, **piece, "done": False, **logprobs}) + "\n"

    def _written_logprobs(self, tokens: list[TokenEvent]) -> Json:
        if not self._logprobs or not tokens:
            return {}
        return {"logprobs": self._logprobs.write(tokens)["content"]}


def whole_calls(choice: Choice) -> list[Json]:
    """Arguments are an object here, so a call that was cut is none."""
    calls = []
    for call in choice.calls:
        with contextlib.suppress(ValueError):
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            calls.append({"id": call.id, "function": {"index": call.nth, **function}})
    return calls


def done(choice: Choice | None) -> dict[str, Any]:
    """The end of an answer; without one the model was only to be loaded, which it is."""
    if choice is None or choice.finish is None:
        return {"done": True, "done_reason": "load"}
    end: FinishEvent = choice.finish
    return {
        "done": True,
        "done_reason": end.reason,
        "total_duration": round(end.timings.end_to_end_ms * NS_PER_MS),
        "load_duration": 0,
        "prompt_eval_count": end.n_prompt,
        "prompt_eval_duration": round(end.timings.prefill_ms * NS_PER_MS),
        "eval_count": end.n_output,
        "eval_duration": round(end.timings.decode_ms * NS_PER_MS),
    }


def rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
