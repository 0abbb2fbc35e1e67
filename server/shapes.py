"""The two OpenAI dialects as tables of small dicts: chat completions and completions.

Owns: object names, the shape of one choice in a body and in a chunk. Must not know:
where events come from, SSE framing, metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..runtime.tokenizer import Tokenizer
from .answer import Choice
from .logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter
from .parts import CallPiece

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How one dialect writes a choice."""

    body_object: str
    chunk_object: str
    logprob_writer: Callable[[Tokenizer], LogprobWriter]
    body: Callable[[Choice, str], Json]
    """A whole choice; the string is echoed prompt text."""
    opening: Json
    """The delta that comes with the first token; {} for none."""
    piece: Callable[[str], Json]
    """The delta of more text."""
    reasoning: Callable[[str], Json]
    """The delta of more reasoning."""
    call: Callable[[CallPiece], Json]
    """The delta of more of a tool call."""
    closing: Json
    """The delta of the chunk that carries the finish reason."""
    has_choice_prompts: bool
    """Whether logprobs of the prompt stand in each choice, as there may be several prompts."""


def _message(choice: Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for _, id_, name, arguments in choice.calls
        ]
    return {**message, **_reasoning(choice.reasoning)} if choice.reasoning else message


def _call(piece: CallPiece) -> Json:
    """id, type and name come once, before the arguments."""
    index, id_, name, arguments = piece
    delta: Json = {"index": index, "function": {"arguments": arguments}}
    if name:
        function = {"name": name, "arguments": arguments}
        delta = {"index": index, "id": id_, "type": "function", "function": function}
    return {"delta": {"tool_calls": [delta]}}


def _reasoning(text: str) -> Json:
    """Under both names in use: readers take one or the other."""
    return {"reasoning_content": text, "reasoning": text}


CHAT = Shape(
    body_object="chat.completion",
    chunk_object="chat.completion.chunk",
    logprob_writer=ChatLogprobs,
    body=lambda choice, echo: {"message": _message(choice)},
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text}},
    reasoning=lambda text: {"delta": _reasoning(text)},
    call=_call,
    closing={"delta": {}},
    has_choice_prompts=False,
)

COMPLETION = Shape(
    body_object="text_completion",
    chunk_object="text_completion",
    logprob_writer=CompletionLogprobs,
    body=lambda choice, echo: {"text": echo + choice.text},
    opening={},
    piece=lambda text: {"text": text},
    reasoning=lambda text: {"text": text},  # nothing is split here
    call=lambda piece: {},
    closing={"text": ""},
    has_choice_prompts=True,
)


def choice_entry(index: int, content: Json, logprobs: Json | None, finish: str | None) -> Json:
    """An entry of `choices`; every key is always there, as in OpenAI's own answers."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
