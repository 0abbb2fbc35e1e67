"""What the figures of many requests mean together: percentiles, rates of a window, goodput.

Owns: those rules, for whoever has seen requests: the engine's owner or a client. Must not know: how
requests were made or are shown. docs/metrics.md is this in prose.

Only requests that ended well give latencies and tokens. The window of all rates goes from the first
arrival to the last end of all requests, failed and cancelled ones too: their time was spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .latency import Timings, step_gaps_ms, token_gaps_ms

Outcome: TypeAlias = Literal["ok", "cancelled", "error"]
NS_PER_S = 1_000_000_000
PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True)
class Seen:
    """One request as somebody saw it; stamps are of one monotonic clock, in nanoseconds."""

    arrived_ns: int
    """When it should have been sent (open loop), or was (closed loop)."""
    end_ns: int
    """The last output token; of what did not end well or was not streamed, the end."""
    outcome: Outcome
    n_output: int
    n_prompt: int | None = None
    n_cached: int = 0
    """Prompt tokens that were not computed."""
    piece_ns: tuple[int, ...] = ()
    """When each piece of a stream came; empty where the answer was not streamed."""
    piece_tokens: tuple[int, ...] | None = None
    """Output tokens in each piece; None: not told, and not one in each."""

    @property
    def timings(self) -> Timings:
        """A client sees no queue: it counts as prefill."""
        return Timings.from_stamps(
            arrived=self.arrived_ns,
            scheduled=self.arrived_ns,
            first_token=self.piece_ns[0] if self.piece_ns else None,
            end=self.end_ns,
            n_output=self.n_output,
        )

    @property
    def ttft_ms(self) -> float | None:
        return self.timings.ttft_ms if self.piece_ns else None

    @property
    def tpot_ms(self) -> float | None:
        return self.timings.tpot_ms if self.piece_ns else None

    @property
    def amortised_tpot_ms(self) -> float | None:
        return self.timings.amortised_tpot_ms

    @property
    def end_to_end_ms(self) -> float:
        return self.timings.end_to_end_ms

    @property
    def step_gaps_ms(self) -> list[float]:
        return step_gaps_ms(self.piece_ns)

    @property
    def token_gaps_ms(self) -> list[float]:
        """Empty where nobody told which piece held how many tokens."""
        return token_gaps_ms(self.piece_ns, self.piece_tokens) if self.piece_tokens else []


PER_REQUEST = ("ttft_ms", "tpot_ms", "amortised_tpot_ms", "end_to_end_ms")
POOLED = {"itl_ms": "token_gaps_ms", "step_gap_ms": "step_gaps_ms"}


def samples(name: str, seen: Iterable[Seen]) -> list[float]:
    """Of PER_REQUEST one for each request that has it, of POOLED all gaps of all requests."""
    well = [each for each in seen if each.outcome == "ok"]
    if name in POOLED:
        return [gap for each in well for gap in getattr(each, POOLED[name])]
    values = (getattr(each, name) for each in well)
    return [value for value in values if value is not None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks, where the smallest of n values is at 0 % and the
    largest at 100 % (Hyndman and Fan's seventh, NumPy's default). None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    low, share = divmod((len(ordered) - 1) * percent / 100, 1)
    at = int(low)
    if share == 0:
        return ordered[at]
    return ordered[at] + (ordered[at + 1] - ordered[at]) * share


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """`{"n": 8, "mean": …, "p50": …, … "max": …}`"""
    mean = math.fsum(values) / len(values) if values else None
    marks = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return {"n": len(values), "mean": mean, **marks, "max": max(values, default=None)}


def window_s(seen: Sequence[Seen]) -> float:
    """From the first arrival to the last end, whatever became of the requests."""
    if not seen:
        return 0.0
    span = max(each.end_ns for each in seen) - min(each.arrived_ns for each in seen)
    return span / NS_PER_S


def rates(seen: Sequence[Seen]) -> dict[str, float | None]:
    """Per second of the window. What ended badly gives no tokens, and its time counts."""
    seconds = window_s(seen)
    well = [each for each in seen if each.outcome == "ok"]
    n_prompt = sum(each.n_prompt or 0 for each in well)
    is_known = all(each.n_prompt is not None for each in well)
    counts: dict[str, float | None] = {
        "requests_per_s": len(well),
        "output_tokens_per_s": sum(each.n_output for each in well),
        "input_tokens_per_s": n_prompt if is_known else None,
        "computed_input_tokens_per_s": (
            n_prompt - sum(each.n_cached for each in well) if is_known else None
        ),
    }
    return {
        name: count / seconds if count is not None and seconds else None
        for name, count in counts.items()
    }


def meets(each: Seen, objectives: Mapping[str, float]) -> bool:
    """Whether it ended well within all of them: {"ttft_ms": 1000, "tpot_ms": 100}, at most.

    One output token has no time per output token, so it meets any. A first token that nobody saw,
    as without a stream, meets none. Of pooled figures the largest gap of the request counts.
    """
    if each.outcome != "ok":
        return False
    return all(_meets_one(each, name, most) for name, most in objectives.items())


def _meets_one(each: Seen, name: str, most_ms: float) -> bool:
    has_later = each.n_output > 1
    if name in POOLED:
        gaps: list[float] = getattr(each, POOLED[name])
        return max(gaps) <= most_ms if gaps else not has_later
    value: float | None = getattr(each, name)
    if value is None:
        return name == "tpot_ms" and not has_later
    return value <= most_ms


def goodput(seen: Sequence[Seen], objectives: Mapping[str, float]) -> dict[str, float | int | None]:
    """Requests within all objectives: how many, their share, and per second of the window."""
    n_good, seconds = sum(meets(each, objectives) for each in seen), window_s(seen)
    return {
        "n_good": n_good,
        "share": n_good / len(seen) if seen else None,
        "requests_per_s": n_good / seconds if seconds else None,
    }
