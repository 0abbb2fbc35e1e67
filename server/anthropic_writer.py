"""Answers in Anthropic's dialect: blocks of thinking and text, streamed as named events or whole.

Owns: the shapes of /v1/messages. Must not know: sockets, jobs, how a request was read.

    message_start, (content_block_start, content_block_delta…, content_block_stop)…,
    message_delta with stop_reason and usage, message_stop
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.events import Event
from ..runtime.tokenizer import Tokenizer
from .answer import Choice
from .errors import ApiError, anthropic_shape
from .parts import CallPiece
from .reply import Json, Reply
from .sse import MEDIA_TYPE, frame, named_sse


class Kind(NamedTuple):
    """A kind of block."""

    empty: Json
    delta: str
    key: str


# No answer here is signed; the field is what clients expect of a block.
THINKING = Kind({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")
TEXT = Kind({"type": "text", "text": ""}, "text_delta", "text")


class AnthropicWriter:
    media_type = MEDIA_TYPE
    ping = named_sse({"type": "ping"})

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        [self._choice] = reply.choices
        self._index = -1
        self._kind: Kind | None = None
        self._frame = ("", "")

    def start(self) -> str:
        # How much of the prompt is cached is known later: message_delta corrects this.
        message = {
            **self._message([], None, None),
            "usage": _usage(self._choice.n_prompt, 0, 0),
        }
        return named_sse({"type": "message_start", "message": message})

    def event(self, index: int, event: Event) -> str:
        text = ""
        for is_reasoning, piece in self._choice.add(event):
            if isinstance(piece, CallPiece):
                text += self._call(piece)
                continue
            kind = THINKING if is_reasoning else TEXT
            if kind is not self._kind:
                text += self._close() + self._open(kind)
            before, after = self._frame
            text += before + json.dumps(piece) + after
        return text

    def _call(self, piece: CallPiece) -> str:
        if piece.name:
            empty = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            return self._close() + self._open(Kind(empty, "input_json_delta", "partial_json"))
        before, after = self._frame
        return before + json.dumps(piece.arguments) + after

    def end(self) -> str:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": usage(self._choice)}
        return self._close() + named_sse(last) + named_sse({"type": "message_stop"})

    def error(self, error: ApiError) -> str:
        return named_sse(anthropic_shape(error))

    def body(self) -> Json:
        choice = self._choice
        told = ((THINKING, choice.reasoning), (TEXT, choice.text))
        content = [{**kind.empty, kind.key: text} for kind, text in told if text]
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}
            for call in choice.calls
        ]
        return {**self._message(content, *self._stop()), "usage": usage(choice)}

    def _message(self, content: list[Json], reason: str | None, sequence: str | None) -> Json:
        return {
            "id": self._reply.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _open(self, kind: Kind) -> str:
        self._index, self._kind = self._index + 1, kind
        # The index stands before the text, so the text is the last empty string.
        delta = {"type": kind.delta, kind.key: ""}
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        self._frame = frame(named_sse(event))
        start = {"type": "content_block_start", "index": self._index, "content_block": kind.empty}
        return named_sse(start)

    def _close(self) -> str:
        if self._kind is None:
            return ""
        self._kind = None
        return named_sse({"type": "content_block_stop", "index": self._index})

    def _stop(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        request, end = self._reply.request, self._choice.finish
        assert end is not None
        if end.reason == "length":
            is_full = end.n_output < request.max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if self._choice.calls:
            return "tool_use", None
        sequence = stop_hit(self._choice, request.stop_sequences, self._reply.tokenizer)
        return ("stop_sequence" if sequence else "end_turn"), sequence


def _input(call: CallPiece) -> Json:
    """Of a call that was cut there is no object."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def stop_hit(choice: Choice, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """The stop string that ended an answer; None where the model ended it itself."""
    ids = [token.token_id for token in choice.tokens]
    if not stops or ids[-1] in tokenizer.eog_ids:
        return None
    text = tokenizer.decode(ids)
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    return min(ends, key=lambda stop: (ends[stop], -len(stop)), default=None)


def usage(choice: Choice) -> Json:
    end = choice.finish
    assert end is not None
    return _usage(end.n_prompt - end.n_cached, end.n_cached, end.n_output)


def _usage(n_computed: int, n_cached: int, n_output: int) -> Json:
    """In this dialect cached tokens stand beside the input's, not within."""
    return {
        "input_tokens": n_computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
    }
