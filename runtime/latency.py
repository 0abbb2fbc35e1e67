"""What the time figures of one request mean, wherever they are shown.

Owns: Timings (from the stamps of one request) and DEFINITIONS, the words for every figure. Must not
know: who took the stamps (the engine, or a client that watches a stream), how figures of many
requests become one (aggregates.py), where they are shown. docs/metrics.md is this in prose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class Definition:
    """One figure: between which events, and what becomes of cases that have no such time."""

    meaning: str
    """In one line."""
    start: str
    end: str
    over: str
    """What percentiles and means are taken over."""
    odd: str = ""
    """What happens where it is undefined."""


DEFINITIONS: dict[str, Definition] = {
    "queue_ms": Definition(
        "From arrival to the first step that holds a row of the request.",
        "arrival",
        "first step with a row of it",
        "requests",
        "a client cannot see it: its prefill includes it",
    ),
    "prefill_ms": Definition(
        "From the first step to the first output token.",
        "first step with a row of it",
        "first output token",
        "requests",
        "cached prompt tokens shorten it; preemptions before the first token lengthen it",
    ),
    "decode_ms": Definition(
        "From the first output token to the last.",
        "first output token",
        "last output token",
        "requests",
        "0 for one output token",
    ),
    "ttft_ms": Definition(
        "From arrival to the first output token: queue + prefill.",
        "arrival",
        "first output token",
        "requests",
        "none without an output token; a client has none where the answer is not streamed",
    ),
    "tpot_ms": Definition(
        "Decode time / (output tokens - 1), per request; requests of one token are left out.",
        "first output token",
        "last output token",
        "requests",
        "none below two output tokens, and for a client where the answer is not streamed",
    ),
    "amortised_tpot_ms": Definition(
        "End-to-end time / output tokens, per request: waiting and prefill included.",
        "arrival",
        "last output token",
        "requests",
        "none without an output token",
    ),
    "itl_ms": Definition(
        "Gap between two output tokens of a request; one sample per gap, all requests pooled.",
        "an output token",
        "the next one of the same request",
        "tokens after the first",
        "tokens of one step have gaps of 0 between them; long answers give more samples",
    ),
    "step_gap_ms": Definition(
        "Gap between two pieces of a stream, whatever the number of tokens in them.",
        "a step that gave tokens",
        "the next such step of the same request",
        "steps after the first",
        "equal to itl_ms where every step gives one token",
    ),
    "end_to_end_ms": Definition(
        "From arrival to the last output token: queue + prefill + decode.",
        "arrival",
        "last output token",
        "requests",
        "for a client without a stream: the end of the answer",
    ),
}


def rate_per_s(count: float, span_ms: float | None) -> float | None:
    """None where there is nothing to count, or no time in which it happened."""
    return 1000 * count / span_ms if span_ms and count > 0 else None


def step_gaps_ms(step_ns: Sequence[int]) -> list[float]:
    """Of one request, from the stamps of the steps (or pieces of a stream) that gave it tokens."""
    return [(after - before) / NS_PER_MS for before, after in pairwise(step_ns)]


def token_gaps_ms(step_ns: Sequence[int], step_tokens: Sequence[int]) -> list[float]:
    """Of one request: n - 1 gaps, which add up to its decode time. The first token of a step comes
    a whole gap after the step before, the others with it."""
    at = [ns for ns, n in zip(step_ns, step_tokens, strict=True) for _ in range(n)]
    return step_gaps_ms(at)


@dataclass(frozen=True)
class Timings:
    """Where the time of one request went, in milliseconds of the monotonic clock.

    Every moment belongs to exactly one of three phases, which meet without a gap:

    arrival --queue--> first scheduled --prefill--> first token --decode--> end

    `end` is the last token's stamp for "stop" and "length", else the moment of the cancellation,
    deadline or error. A phase that was not reached is 0. Waiting after a preemption stays in its
    phase.
    """

    queue_ms: float
    """From arrival, at its owner or else in `submit`, to the first step that holds a row of it."""
    prefill_ms: float
    """From then until the first output token was drawn."""
    decode_ms: float
    """From the first output token to the end."""
    n_output: int
    """Output tokens, an end-of-generation token included."""

    @classmethod
    def from_stamps(
        cls,
        *,
        arrived: int,
        scheduled: int | None,
        first_token: int | None,
        end: int,
        n_output: int,
    ) -> Timings:
        """From time.monotonic_ns stamps; None where that moment never came."""
        scheduled = end if scheduled is None else scheduled
        first_token = end if first_token is None else first_token
        return cls(
            queue_ms=(scheduled - arrived) / NS_PER_MS,
            prefill_ms=(first_token - scheduled) / NS_PER_MS,
            decode_ms=(end - first_token) / NS_PER_MS,
            n_output=n_output,
        )

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: queue + prefill. None without any token."""
        return self.queue_ms + self.prefill_ms if self.n_output else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: decode ÷ (n - 1). None below two tokens."""
        return self.decode_ms / (self.n_output - 1) if self.n_output > 1 else None

    @property
    def amortised_tpot_ms(self) -> float | None:
        """End to end ÷ n: waiting and prefill spread over the tokens. None without any token."""
        return self.end_to_end_ms / self.n_output if self.n_output else None

    @property
    def end_to_end_ms(self) -> float:
        """Arrival to end; exactly the sum of the three phases, by construction."""
        return self.queue_ms + self.prefill_ms + self.decode_ms
