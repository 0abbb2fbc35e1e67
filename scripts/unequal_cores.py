"""What one slow core costs: a thread that idles after its work as long as that took, in turns with
equal ones. Not a subcommand: for those who change how work is dealt out.
Owns the turns and the share of the ideal; must not know how work is dealt out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated

import typer
from martlet.scripts import options
from martlet.scripts.bench_cases import Bench, Case

SETTLE_STEPS = 3  # in which shares follow what was measured before


def unequal_cores(
    model: options.ModelArgument,
    threads: Annotated[int, typer.Option("-t", "--threads", min=2)] = 2,
    slower: Annotated[float, typer.Option(help="Times that the thread idles.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="Turns.")] = 9,
) -> None:
    """Prefill and decode of MODEL with equal threads and with the last one slowed down."""
    from martlet.scripts.bench_open import Options, open_bench

    prefill, decode = Case("prefill", 256), Case("decode", 24)
    with open_bench(model, [prefill, decode], Options("native", threads)) as opened:
        opened.bench.warm_up([prefill, decode])
        for case in (prefill, decode):
            equal, slowed = in_turns(opened.bench, case, slower, repeat)
            print(line(case, equal, slowed, threads, slower))


def in_turns(
    bench: Bench, case: Case, slower: float, repeat: int
) -> tuple[list[float], list[float]]:
    """Seconds of the case, each time with equal threads and with the last one slowed down."""
    executor = bench.executor
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for found, idles in zip(times, (0.0, slower), strict=True):
            executor.slow_down(executor.n_threads - 1, idles)  # type: ignore[attr-defined]
            first = next(bench.steps(case))
            for _ in range(SETTLE_STEPS):
                executor.run(first)
            found.append(bench.run(case))
    return times


def line(
    case: Case, equal: Sequence[float], slowed: Sequence[float], threads: int, slower: float
) -> str:
    """The ideal is the rate of equal threads by as many as the cores then are worth."""
    ideal = (threads - 1 + 1 / (1 + slower)) / threads
    rate = statistics.median(equal) / statistics.median(slowed)
    ratios = [e / s / ideal for e, s in zip(equal, slowed, strict=True)]
    return (
        f"{case.label:<12} equal {case.n_tokens / statistics.median(equal):.1f} tokens/s, "
        f"slowed {case.n_tokens / statistics.median(slowed):.1f}: {rate / ideal:.0%} of the ideal "
        f"{ideal:.2f} ({min(ratios):.0%} to {max(ratios):.0%} in {len(ratios)} turns)"
    )


if __name__ == "__main__":
    typer.run(unequal_cores)
