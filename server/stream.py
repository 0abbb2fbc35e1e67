"""A running job as server-sent events, or collected into one body.

Owns: SSE framing, the order of chunks, what goes with the first and the last of them. Must not
know: dialects beyond their Shape, sockets, how a request was read.

Framing: one `data: ` line and a blank line per event, comments as signs of life, never `id:` or
`event:`, newlines and U+2028 only as JSON escapes, `[DONE]` at a regular end. A failure after the
start is an object with `error`, then the stream ends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ..runtime.events import Event, FinishEvent, TokenEvent
from ..runtime.tokenizer import Tokenizer
from .answer import Choice, best, slowest, timings, usage
from .bridge import EngineStalled, Job, Patience
from .errors import ApiError, fault, late
from .logprobs import LogprobWriter
from .schema import MAX_CHOICES
from .shapes import Json, Shape, choice_entry

PING = ": ping\n\n"
DONE = "data: [DONE]\n\n"


def sse(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=True, separators=(',', ':'))}\n\n"


def frame(value: Json) -> tuple[str, str]:
    """The event before and after its only empty string, to put other strings in its place."""
    before, _, after = sse(value).rpartition('""')
    return before, after


@dataclass(frozen=True)
class Reply:
    """Everything about an answer that does not change while it is made."""

    shape: Shape
    tokenizer: Tokenizer
    head: Json
    """id, created, model, system_fingerprint: equal in every chunk."""
    choices: list[Choice]
    echoes: list[str]
    """Prompt text to put before each choice; "" for none."""
    n_best: int = MAX_CHOICES
    """Choices shown per prompt: those with the highest mean logprob, where there are more."""
    has_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def unfinished(choice: Choice) -> ApiError:
    """For a choice that has a failure."""
    is_late = choice.finish is not None and choice.finish.reason == "deadline"
    return (late if is_late else fault)(choice.failure or "")


async def collect(job: Job, reply: Reply, patience: Patience) -> Json:
    """The body of a non-streamed answer. Raises ApiError."""
    try:
        async for batch in job.batches(Patience(ping_s=0, stall_s=patience.stall_s)):
            for arrival in batch:
                choice = reply.choices[arrival.index]
                choice.add(arrival.event)
                if choice.failure:
                    raise unfinished(choice)
    except EngineStalled as error:
        raise fault(str(error), code="engine_stalled") from None
    end = slowest(reply.choices)
    return {
        **reply.head,
        "object": reply.shape.body_object,
        "choices": [_whole(reply, c, n) for n, c in enumerate(best(reply.choices, reply.n_best))],
        "usage": usage(reply.choices),
        "timings": timings(end) if end else None,
    }


def _whole(reply: Reply, choice: Choice, index: int) -> Json:
    assert choice.finish is not None
    logprobs = None
    if reply.has_logprobs:
        logprobs = reply.shape.logprob_writer(reply.tokenizer).write(choice.tokens)
    content = reply.shape.body(choice, reply.echoes[choice.index])
    entry = choice_entry(index, content, logprobs, choice.finish.reason)
    return {**entry, "seed": choice.finish.seed}


async def stream(job: Job, reply: Reply, patience: Patience) -> AsyncIterator[str]:
    """The events of a streamed answer, several per string where they came together."""
    writers = [ChoiceWriter(reply, choice) for choice in reply.choices]
    try:
        async for batch in job.batches(patience):
            if not batch:
                yield PING
                continue
            yield "".join([_text(writers[arrival.index], arrival.event) for arrival in batch])
            failed = next((c for c in reply.choices if c.finish and c.failure), None)
            if failed:
                yield sse(unfinished(failed).body())
                return
    except EngineStalled as error:
        yield sse(fault(str(error), code="engine_stalled").body())
        return
    if reply.include_usage:
        end = slowest(reply.choices)
        tail: Json = {"choices": [], "usage": usage(reply.choices)}
        yield sse(_chunk(reply, {**tail, "timings": timings(end) if end else None}))
    yield DONE


def _text(writer: ChoiceWriter, event: Event) -> str:
    writer.choice.add(event)
    if isinstance(event, TokenEvent):
        return writer.token(event)
    return "" if writer.choice.failure else writer.end(event)


def _chunk(reply: Reply, content: Json) -> Json:
    return {**reply.head, "object": reply.shape.chunk_object, **content}


@dataclass
class ChoiceWriter:
    """Turns the events of one choice into chunks."""

    reply: Reply
    choice: Choice
    is_open: bool = False
    held: list[TokenEvent] = field(default_factory=list)
    """Tokens whose logprobs wait for the text they belong to."""
    logprobs: LogprobWriter | None = None

    def __post_init__(self) -> None:
        if self.reply.has_logprobs:
            self.logprobs = self.reply.shape.logprob_writer(self.reply.tokenizer)
        # What is the same in every chunk of text is written once.
        self._frame = frame(self._chunk(self.reply.shape.piece(""), None))

    def token(self, event: TokenEvent) -> str:
        # The opening comes with the first token, so that any first chunk marks its time.
        opening = "" if self.is_open else self._open()
        if self.logprobs:
            self.held.append(event)
        return opening + self._piece(event.text)

    def end(self, event: FinishEvent) -> str:
        opening = "" if self.is_open else self._open()
        text = self._piece(event.text)  # before the closing: held logprobs go with the text
        return opening + text + self._entry(self.reply.shape.closing, event)

    def _open(self) -> str:
        self.is_open = True
        opening = self.reply.shape.opening
        text = self._entry(opening) if opening else ""
        return text + self._piece(self.reply.echoes[self.choice.index])

    def _piece(self, text: str) -> str:
        if not text:
            return ""
        if self.logprobs or self.reply.continuous_usage:
            return self._entry(self.reply.shape.piece(text))
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
        if self.reply.continuous_usage:
            extras["usage"] = usage(self.reply.choices)
        return _chunk(self.reply, {"choices": [entry], **extras})
