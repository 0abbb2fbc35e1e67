"""The answers of chat completions and completions, streamed and whole.

Owns: what goes into which chunk, what goes with the first and the last of them, `[DONE]` at a
regular end. Must not know: sockets, jobs, how a request was read. No `event:` names here: clients
of these two routes do not expect them. A failure after the start is an object with `error`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..runtime.events import Event, FinishEvent, TokenEvent
from .answer import Choice, best, slowest, timings, usage
from .errors import ApiError
from .logprobs import EchoedPrompt, LogprobWriter, prompt_logprobs
from .parts import CallPiece, Part
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
        self.has_token_ids = request.return_token_ids
        self.continuous_usage = bool(request.stream_options.continuous_usage_stats)
        self._choices = [ChoiceWriter(self, choice) for choice in reply.choices]

    def start(self) -> str:
        return ""  # the opening comes with the first token, so that any first chunk marks its time

    def event(self, index: int, event: Event) -> str:
        writer = self._choices[index]
        parts = writer.choice.add(event)
        if isinstance(event, TokenEvent):
            return writer.token(event, parts)
        if not isinstance(event, FinishEvent):
            return ""  # the prompt's part comes with the first token
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
        of_prompt = {} if self.shape.has_choice_prompts else self._of_prompt(shown[0])
        return {
            **self.head,
            "object": self.shape.body_object,
            "choices": [self._whole(choice, index) for index, choice in enumerate(shown)],
            "usage": usage(self.reply.choices),
            "timings": self._timings(),
            **of_prompt,
        }

    def echoed(self, choice: Choice) -> EchoedPrompt | None:
        """The prompt where its tokens are listed before those of the choice."""
        request, ids = self.reply.request, self.reply.prompt_ids[choice.index]
        logprobs = choice.prompt_logprobs
        if not self.has_logprobs or logprobs is None or not getattr(request, "echo", False):
            return None
        return EchoedPrompt(ids, logprobs, self.reply.echoes[choice.index], request.n_logprobs)

    def _of_prompt(self, choice: Choice) -> Json:
        n_top, logprobs = self.reply.request.prompt_logprobs, choice.prompt_logprobs
        told = self.prompt_ids(choice)
        if n_top is None or logprobs is None:
            return told
        ids = self.reply.prompt_ids[choice.index]
        scores = prompt_logprobs(self.reply.tokenizer, ids, logprobs, n_top)
        return {**told, "prompt_logprobs": scores}

    def prompt_ids(self, choice: Choice) -> Json:
        """Where they were asked for, under vLLM's name."""
        ids = self.reply.prompt_ids[choice.index]
        return {"prompt_token_ids": [*map(int, ids)]} if self.has_token_ids else {}

    def token_ids(self, tokens: Sequence[TokenEvent]) -> Json:
        return {"token_ids": [event.token_id for event in tokens]} if self.has_token_ids else {}

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
        logprobs = with_echo(writer, self.echoed(choice), choice.tokens) if writer else None
        content = self.shape.body(choice, self.reply.echoes[choice.index])
        entry = choice_entry(index, content, logprobs, choice.reason)
        of_prompt = self._of_prompt(choice) if self.shape.has_choice_prompts else {}
        return {**entry, **self.token_ids(choice.tokens), "seed": choice.finish.seed, **of_prompt}


def with_echo(
    writer: LogprobWriter, prompt: EchoedPrompt | None, tokens: Sequence[TokenEvent]
) -> Json:
    """The lists of the prompt, where there is one, and those of the answer behind them."""
    if prompt is None:
        return writer.write(tokens)
    of_prompt = writer.echo(prompt)  # first: the answer's offsets begin where it ends
    return {name: of_prompt[name] + of_answer for name, of_answer in writer.write(tokens).items()}


@dataclass
class ChoiceWriter:
    """Turns the events of one choice into chunks."""

    answer: OpenAiWriter
    choice: Choice
    is_open: bool = False
    held: list[TokenEvent] = field(default_factory=list)
    """Tokens whose logprobs or ids wait for the text they belong to."""
    of_prompt: Json = field(default_factory=dict)
    """What the next chunk tells of the prompt."""

    def __post_init__(self) -> None:
        self.logprobs = self.answer.logprob_writer()
        # What is the same in every chunk of text is written once.
        self._frame = frame(sse(self._chunk(self.answer.shape.piece(""), None)))
        self.of_prompt = self.answer.prompt_ids(self.choice)

    def token(self, event: TokenEvent, parts: list[Part]) -> str:
        opening = "" if self.is_open else self._open()
        if self.logprobs or self.answer.has_token_ids:
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
        echo = self.answer.reply.echoes[self.choice.index]
        prompt = self.answer.echoed(self.choice)
        if prompt is None or self.logprobs is None:
            return text + self._piece(echo)
        return text + sse(self._chunk(self.answer.shape.piece(echo), self.logprobs.echo(prompt)))

    def _text(self, parts: list[Part]) -> str:
        written = ""
        for is_reasoning, text in parts:
            if isinstance(text, CallPiece):
                written += self._entry(self.answer.shape.call(text))
            elif is_reasoning:
                written += self._entry(self.answer.shape.reasoning(text))
            else:
                written += self._piece(text)
        return written

    def _piece(self, text: str) -> str:
        if not text:
            return ""
        if self.logprobs or self.answer.has_token_ids or self.answer.continuous_usage:
            return self._entry(self.answer.shape.piece(text))
        before, after = self._frame
        return before + json.dumps(text) + after

    def _entry(self, content: Json, end: FinishEvent | None = None) -> str:
        logprobs = None
        if self.logprobs and self.held:
            logprobs = self.logprobs.write(self.held)
        tokens, self.held = self.held, []
        return sse(self._chunk({**content, **self.answer.token_ids(tokens)}, logprobs, end))

    def _chunk(self, content: Json, logprobs: Json | None, end: FinishEvent | None = None) -> Json:
        reason = self.choice.reason if end else None
        entry = choice_entry(self.choice.index, content, logprobs, reason)
        of_prompt, self.of_prompt = self.of_prompt, {}
        is_here = self.answer.shape.has_choice_prompts
        extras: Json = {} if is_here else of_prompt
        entry |= of_prompt if is_here else {}
        if end:
            entry["seed"] = end.seed
            extras["timings"] = timings(end)
        if self.answer.continuous_usage:
            extras["usage"] = usage(self.answer.reply.choices)
        return self.answer.chunk({"choices": [entry], **extras})
