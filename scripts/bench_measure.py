"""Times cases and the machine's limits in turn, and sets the one against the other.
Owns repeats, medians and shares of the limit; must not know how results are shown.

Within one repeat all cases are measured once, the limits before and after them, and every other
repeat goes backwards, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from martlet.runtime.executors.limits import MachineLimits
from martlet.runtime.plan import Plan
from martlet.runtime.work import Speed, Work, steps_work
from martlet.scripts.bench_cases import Bench, Case

LIMIT_SECONDS = 0.15  # of one measurement of one limit


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one thing."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)


LimitSampler = Callable[[MachineLimits, int], float]
LIMITS: dict[str, LimitSampler] = {
    "int8_macs": lambda m, _: m.int8_macs(LIMIT_SECONDS),
    "f32_macs": lambda m, _: m.f32_macs(LIMIT_SECONDS),
    "read_bytes": lambda m, _: m.read_bytes(LIMIT_SECONDS),
    "read_bytes_small_pages": lambda m, _: m.read_bytes(LIMIT_SECONDS, small_pages=True),
    # A small model stays in the last cache, where reading is faster than from memory.
    "read_bytes_model_size": lambda m, span: m.read_bytes(LIMIT_SECONDS, span_bytes=span),
}


@dataclass
class Limits:
    """Samples of every limit, per second; empty where there is no native library to measure."""

    machine: MachineLimits | None
    span_bytes: int  # what one decode step reads of the weights
    samples: dict[str, list[float]] = field(default_factory=dict)

    def sample(self) -> None:
        if self.machine is not None:
            for name, measure in LIMITS.items():
                value = measure(self.machine, self.span_bytes)
                self.samples.setdefault(name, []).append(value)

    def figures(self) -> dict[str, Figure]:
        return {name: Figure(tuple(values)) for name, values in self.samples.items()}

    def speed(self) -> Speed | None:
        """Medians; reading at the better of its two speeds."""
        if not self.samples:
            return None
        found = {name: figure.median for name, figure in self.figures().items()}
        read = max(found["read_bytes"], found["read_bytes_model_size"])
        return Speed(found["int8_macs"], found["f32_macs"], read)


@dataclass(frozen=True)
class Share:
    """The least time that the limits allow ÷ the time taken, and which of them binds."""

    of_limit: float
    binds: Literal["multiply", "memory"]


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: Figure
    work: Work

    @property
    def tokens_per_s(self) -> Figure:
        return Figure(tuple(self.case.tokens_in_all / s for s in self.seconds.samples))

    @property
    def macs_per_s(self) -> float:
        return self.work.macs / self.seconds.median

    @property
    def bytes_per_s(self) -> float:
        return self.work.n_bytes / self.seconds.median

    def share(self, speed: Speed | None) -> Share | None:
        return share_of_limit(self.work, self.seconds.median, speed)


def share_of_limit(work: Work, seconds: float, speed: Speed | None) -> Share | None:
    if speed is None:
        return None
    multiply, memory = speed.seconds(work)
    return Share(max(multiply, memory) / seconds, "multiply" if multiply > memory else "memory")


def measure(
    bench: Bench,
    plan: Plan,
    cases: Sequence[Case],
    limits: Limits,
    repeat: int,
    on_case: Callable[[str], None],
) -> list[Result]:
    """Runs everything `repeat` times; `limits` collects its samples."""
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    on_case("warm-up")
    bench.warm_up(cases)
    for turn in range(repeat):
        limits.sample()
        for case in in_turn(cases, turn):
            on_case(f"{turn + 1}/{repeat} {case.label}")
            seconds[case].append(bench.run(case))
        limits.sample()
    on_case("")
    value_bytes = kv_value_bytes(bench, plan)
    return [
        Result(case, Figure(tuple(seconds[case])), steps_work(plan, bench.steps(case), value_bytes))
        for case in cases
    ]


def in_turn(cases: Sequence[Case], turn: int) -> Sequence[Case]:
    return cases[::-1] if turn % 2 else cases


def kv_value_bytes(bench: Bench, plan: Plan) -> float:
    """Bytes of one cached value, padding included where the executor tells its pool's size."""
    pool_bytes: int | None = getattr(bench.executor, "kv_bytes", None)
    if not pool_bytes:
        return 2
    n_slots = bench.executor.n_blocks * bench.executor.block_tokens
    return pool_bytes / n_slots / plan.kv_values_per_token()
