"""The answers of chat completions and completions, streamed and whole.

Owns: what goes into which chunk, what goes with the first and the last of them, `[DONE]` at a
regular end. Must not know: sockets, jobs, how a request was read. No `event:` names here: clients
of these two routes do not expect them. A failure after the start is an object with `error`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..runtime.events import Event, FinishEvent, TokenEvent
from .answer import Choice, best, slowest, timings, usage
from .errors import ApiError
from .logprobs import LogprobWriter
from .reasoning import Part
from .reply import Json, Reply
from .shapes import Shape, choice_entry
from .sse import DONE, MEDIA_TYPE, PING, frame, sse


class OpenAiWriter:
    media_type, ping = MEDIA_TYPE, PING

    def __init__(self, shape: Shape, reply: Reply) -> None:
        self.shape, self.reply = shape, reply
        request = reply.request
        self.head: Json = {
            "id": reply.id,
            "created": int(reply.created),
            "model": reply.model,
            "system_fingerprint": reply.fingerprint,
        }
        self.has_logprobs = request.n_logprobs is not None
        self.include_usage = bool(request.stream_options.include_usage)
        self.continuous_usage = bool(request.stream_options.continuous_usage_stats)
        self._choices = [ChoiceWriter(self, choice) for choice in reply.choices]

    def start(self) -> str:
        return ""  # the opening comes with the first token, so that any first chunk marks its time

    def event(self, index: int, event: Event) -> str:
        writer = self._choices[index]
        parts = writer.choice.add(event)
        if isinstance(event, TokenEvent):
            return writer.token(event, parts)
        return "" if writer.choice.failure else writer.end(event, parts)

    def end(self) -> str:
        if not self.include_usage:
            return DONE
        tail: Json = {"choices": [], "usage": usage(self.reply.choices)}
        return sse(self.chunk({**tail, "timings": self._timings()})) + DONE

    def error(self, error: ApiError) -> str:
        return sse(error.body())

    def body(self) -> Json:
        shown = best(self.reply.choices, self.reply.request.n)
        return {
            **self.head,
            "object": self.shape.body_object,
            "choices": [self._whole(choice, index) for index, choice in enumerate(shown)],
            "usage": usage(self.reply.choices),
            "timings": self._timings(),
        }

    def chunk(self, content: Json) -> Json:
        return {**self.head, "object": self.shape.chunk_object, **content}

    def logprob_writer(self) -> LogprobWriter | None:
        return self.shape.logprob_writer(self.reply.tokenizer) if self.has_logprobs else None

    def _timings(self) -> Json | None:
        end = slowest(self.reply.choices)
        return timings(end) if end else None

    def _whole(self, choice: Choice, index: int) -> Json:
        assert choice.finish is not None
        writer = self.logprob_writer()
        logprobs = writer.write(choice.tokens) if writer else None
        content = self.shape.body(choice, self.reply.echoes[choice.index])
        entry = choice_entry(index, content, logprobs, choice.finish.reason)
        return {**entry, "seed": choice.finish.seed}


@dataclass
class ChoiceWriter:
    """Turns the events of one choice into chunks."""

    answer: OpenAiWriter
    choice: Choice
    is_open: bool = False
    held: list[TokenEvent] = field(default_factory=list)
    """Tokens whose logprobs wait for the text they belong to."""

    def __post_init__(self) -> None:
        self.logprobs = self.answer.logprob_writer()
        # What is the same in every chunk of text is written once.
        self._frame = frame(sse(self._chunk(self.answer.shape.piece(""), None)))

    def token(self, event: TokenEvent, parts: list[Part]) -> str:
        opening = "" if self.is_open else self._open()
        if self.logprobs:
            self.held.append(event)
        return opening + self._text(parts)

    def end(self, event: FinishEvent, parts: list[Part]) -> str:
        opening = "" if self.is_open else self._open()
        text = self._text(parts)  # before the closing: held logprobs go with the text
        return opening + text + self._entry(self.answer.shape.closing, event)

    def _open(self) -> str:
        self.is_open = True
        opening = self.answer.shape.opening
        text = self._entry(opening) if opening else ""
        return text + self._piece(self.answer.reply.echoes[self.choice.index])

    def _text(self, parts: list[Part]) -> str:
        return "".join(
            [
                self._entry(self.answer.shape.reasoning(part.text))
                if part.is_reasoning
                else self._piece(part.text)
                for part in parts
            ]
        )

    def _piece(self, text: str) -> str:
        if not text:
            return ""
        if self.logprobs or self.answer.continuous_usage:
            return self._entry(self.answer.shape.piece(text))
        before, after = self._frame
        return before + json.dumps(text) + after

    def _entry(self, content: Json, end: FinishEvent | None = None) -> str:
        logprobs = None
        if self.logprobs and self.held:
            logprobs = self.logprobs.write(self.held)
        self.held.clear()
        return sse(self._chunk(content, logprobs, end))

    def _chunk(self, content: Json, logprobs: Json | None, end: FinishEvent | None = None) -> Json:
        entry = choice_entry(self.choice.index, content, logprobs, end.reason if end else None)
        extras: Json = {}
        if end:
            entry["seed"] = end.seed
            extras["timings"] = timings(end)
        if self.answer.continuous_usage:
            extras["usage"] = usage(self.answer.reply.choices)
        return self.answer.chunk({"choices": [entry], **extras})
