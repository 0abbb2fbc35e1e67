"""What a running job has produced so far, in the parts that answers are made of.

Owns: Choice (runs and tokens of one request), usage, timings. Must not know: whether
the answer is streamed, chat or completion shapes, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime.events import DraftCounts, Event, FinishEvent, PromptEvent, TokenEvent, TokenLogprob
from ..runtime.latency import rate_per_s
from ..runtime.pooling import Hidden
from .parts import CallPiece, Kind, Part, Run, begins_run, kind_of
from .reasoning import Splitter, TextPart
from .tool_reader import CallReader


@dataclass
class Choice:
    """One of the answers to a request."""

    index: int
    prompt_index: int
    n_prompt: int
    splitter: Splitter | None = None
    """None: all text is the answer."""
    reader: CallReader | None = None
    """None: no text is a tool call."""
    end_of_calls: str = "tool_calls"
    """The reason of an answer that ended well and has calls."""
    runs: list[Run] = field(default_factory=list)
    """What it is made of, as far as it has come. None of them is empty but for a call's text."""
    n_reasoning: int = 0
    """Tokens that are reasoning, the closing tag's included."""
    answer_from: int = 0
    """The first token that is no reasoning."""
    tokens: list[TokenEvent] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each prompt token but the first, where they were asked for."""
    embedding: Hidden | None = None
    """The prompt as a vector, where that was asked for."""
    finish: FinishEvent | None = None

    def add(self, event: Event) -> list[Part]:
        """What the event adds to the text."""
        if isinstance(event, TokenEvent):
            self.tokens.append(event)
        elif isinstance(event, PromptEvent):
            self.prompt_logprobs, self.embedding = event.logprobs, event.embedding
        else:
            self.finish = event
        if self.splitter is None and self.reader is None:
            parts: list[Part] = [(False, event.text)] if event.text else []
        else:
            texts = self._split(event, self.splitter) if self.splitter else [(False, event.text)]
            parts = self._read(texts, event, self.reader) if self.reader else [*texts]
        for part in parts:
            self._grow(part)
        return parts

    def _grow(self, part: Part) -> None:
        before, (_, piece) = self.runs[-1] if self.runs else None, part
        if before is None or begins_run(before.kind, part):
            first = max(self.answer_from, before.end if before else 0)
            self.runs.append(Run(kind_of(part), first=first))
        run = self.runs[-1]
        if isinstance(piece, CallPiece):
            run.id, run.name = run.id or piece.id, run.name or piece.name
            piece = piece.arguments
        run.text += piece
        run.end = len(self.tokens)

    def _split(self, event: Event, splitter: Splitter) -> list[TextPart]:
        if isinstance(event, FinishEvent):
            return splitter.finish(event.text)
        was_inside = splitter.inside
        parts = splitter.push(event.text)
        if isinstance(event, TokenEvent) and (was_inside or splitter.inside):
            self.n_reasoning += 1
            self.answer_from = len(self.tokens)
        return parts

    def _read(self, texts: list[TextPart], event: Event, reader: CallReader) -> list[Part]:
        parts: list[Part] = []
        for is_reasoning, text in texts:
            parts += [(True, text)] if is_reasoning else reader.push(text)
        return parts + reader.finish() if isinstance(event, FinishEvent) else parts

    @property
    def text(self) -> str:
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    def _joined(self, kind: Kind) -> str:
        return "".join(run.text for run in self.runs if run.kind == kind)

    @property
    def calls(self) -> list[CallPiece]:
        """As far as they have come."""
        calls = (run for run in self.runs if run.kind == "call")
        return [CallPiece(nth, run.id, run.name, run.text) for nth, run in enumerate(calls)]

    def tokens_of(self, run: Run) -> list[TokenEvent]:
        """The last run has all that is left, so the token that ended the answer as well."""
        is_last = not self.runs or run is self.runs[-1]
        return self.tokens[run.first : None if is_last else run.end]

    @property
    def reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        assert self.finish is not None
        ended_well = self.finish.reason == "stop"
        return self.end_of_calls if self.calls and ended_well else self.finish.reason

    @property
    def failure(self) -> str | None:
        """Why this choice has no regular end; cancelled here means not by this client."""
        if self.finish is None or self.finish.reason in ("stop", "length"):
            return None
        return self.finish.error or f"generation was {self.finish.reason} by the server"

    @property
    def n_output(self) -> int:
        return self.finish.n_output if self.finish else len(self.tokens)

    @property
    def mean_logprob(self) -> float:
        """Over all tokens, its end token included; they must have been asked for."""
        logprobs = [token.logprob.logprob for token in self.tokens if token.logprob]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """The n best of each prompt, best first; as they are where there are no more than n."""
    chosen: list[Choice] = []
    for prompt in dict.fromkeys(choice.prompt_index for choice in choices):
        of_prompt = [choice for choice in choices if choice.prompt_index == prompt]
        if len(of_prompt) > n:
            of_prompt = sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:n]
        chosen += of_prompt
    return chosen


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts; a prompt with several choices counts once, cached tokens stay inside."""
    prompts = {choice.prompt_index: choice for choice in reversed(choices)}
    n_prompt = sum(choice.n_prompt for choice in prompts.values())
    n_output = sum(choice.n_output for choice in choices)
    n_cached = sum(choice.finish.n_cached for choice in prompts.values() if choice.finish)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.n_reasoning for choice in choices)
        },
    }


def cache_miss(finish: FinishEvent) -> dict[str, Any] | None:
    """Why the prefix hit ended where it did; null for a whole hit. What is known under another
    salt is not told: it would say what others have asked."""
    miss = finish.trace.miss
    if miss is None:
        return None
    return {"reason": "new" if miss.reason == "salt" else miss.reason, "at_token": miss.at_token}


def timings(finish: FinishEvent) -> dict[str, Any]:
    """llama.cpp's names first, then ours (runtime.latency.Timings). Undefined figures are null.

    Rates count what was computed: prompt tokens outside the cache over prefill, and output tokens
    after the first (which prefill yields) over decode.
    """
    times, drafts = finish.timings, DraftCounts.total(finish.drafts.values())
    n_computed = finish.n_prompt - finish.n_cached
    return {
        "prompt_n": n_computed,
        "cache_n": finish.n_cached,
        "cache_miss": cache_miss(finish),
        "prompt_ms": times.prefill_ms,
        "prompt_per_second": rate_per_s(n_computed, times.prefill_ms),
        "predicted_n": finish.n_output,
        "predicted_ms": times.decode_ms,
        "predicted_per_second": rate_per_s(finish.n_output - 1, times.decode_ms),
        "draft_n": drafts.drafted,
        "draft_n_accepted": drafts.accepted,
        "draft_sources": {name: asdict(counts) for name, counts in finish.drafts.items()},
        "queue_ms": times.queue_ms,
        "prefill_ms": times.prefill_ms,
        "ttft_ms": times.ttft_ms,
        "tpot_ms": times.tpot_ms,
        "end_to_end_ms": times.end_to_end_ms,
    }


def slowest(choices: Sequence[Choice]) -> FinishEvent | None:
    """The end that the whole request waited for."""
    ends = [choice.finish for choice in choices if choice.finish]
    return max(ends, key=lambda end: end.timings.end_to_end_ms, default=None)
