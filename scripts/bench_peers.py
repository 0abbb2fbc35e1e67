"""`martlet bench-peers`: the same cases on martlet and on llama.cpp, in turn within one run.
Owns the command and the alternation; running a peer is in peer_llama.py, tables in
bench_peers_report.py.

Only ratios within one turn count: whatever else the machine does then hits both sides. With busy
loops beside it, each side is also set against its own quiet figure of the same turn."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import bench as single
from martlet.scripts import options
from martlet.scripts.console import print_json

if TYPE_CHECKING:
    from martlet.scripts.bench_cases import Bench, Case
    from martlet.scripts.peer_llama import LlamaCpp

SETTLE_SECONDS = 0.2  # for busy loops to have started
MARTLET = "martlet"


@dataclass
class Alternation:
    """Tokens per second by side, number of busy loops and case: one sample per turn."""

    samples: dict[tuple[str, int, Case], list[float]] = field(default_factory=dict)

    def add(self, side: str, busy: int, found: dict[Case, float]) -> None:
        for case, tokens_per_s in found.items():
            self.samples.setdefault((side, busy, case), []).append(tokens_per_s)

    def of(self, side: str, busy: int, case: Case) -> list[float]:
        return self.samples.get((side, busy, case), [])


def bench_peers(
    model: options.ModelArgument,
    prefill: single.PrefillOption = 512,
    decode: single.DecodeOption = 64,
    batch: single.BatchOption = "1,2,4,8,16",
    depth: single.DepthOption = "0,2048",
    threads: options.ThreadsOption = None,
    repeat: single.RepeatOption = 5,
    executor: options.ExecutorOption = options.ExecutorName.auto,
    isa: single.IsaOption = None,
    step_rows: single.StepRowsOption = 256,
    read_mb: single.ReadMbOption = None,
    llama_bin: Annotated[
        Path | None, typer.Option(help="Folder of llama-bench and llama-batched-bench.")
    ] = None,
    flash: Annotated[str, typer.Option(help="Flash attention of llama.cpp; 1,0 runs both.")] = "1",
    busy: Annotated[
        str, typer.Option(help="Also with so many busy programs beside it, as in 1,2.")
    ] = "0",
    as_json: options.JsonOption = False,
) -> None:
    """martlet against llama.cpp: the same cases in turn, and the ratios of their medians."""
    flashes = single.whole_numbers(flash, "--flash", 0)
    levels = sorted({0, *single.whole_numbers(busy, "--busy", 0)})
    from martlet.scripts import bench_peers_report as reports
    from martlet.scripts.bench_open import Options, open_bench
    from martlet.scripts.peer_llama import LlamaCpp, LlamaPrograms

    programs = LlamaPrograms.find(llama_bin)
    cases = single.cases_of(prefill, decode, batch, depth)
    chosen = Options(executor.value, threads, isa, step_rows, single.mega(read_mb))
    with open_bench(model, cases, chosen) as opened:
        peers = [LlamaCpp(programs, opened.path, opened.n_threads, bool(f)) for f in flashes]
        sample = opened.limits.sample
        found = alternate(opened.bench, peers, cases, levels, repeat, sample, single.tell)
        report = reports.Report.of(opened, peers, cases, levels, found)
    if as_json:
        print_json(report.as_json())
    else:
        print(report.as_text())


def alternate(
    bench: Bench,
    peers: Sequence[LlamaCpp],
    cases: Sequence[Case],
    levels: Sequence[int],
    repeat: int,
    sample_limits: Callable[[], None],
    tell: Callable[[str], None],
) -> Alternation:
    """Every turn runs all sides at every level once; every other turn the peers go first."""
    found = Alternation()
    sides: list[tuple[str, Callable[[Sequence[Case]], dict[Case, float]]]]
    sides = [(MARTLET, lambda which: run_martlet(bench, which))]
    sides += [(peer.name, peer.tokens_per_s) for peer in peers]
    tell("warm-up")
    bench.warm_up(cases)
    for turn in range(repeat):
        sample_limits()
        for level in levels:
            for name, measure in sides[::-1] if turn % 2 else sides:
                tell(f"{turn + 1}/{repeat} {name}, {level} busy")
                with busy_programs(level):
                    found.add(name, level, measure(cases))
        sample_limits()
    tell("")
    return found


def run_martlet(bench: Bench, cases: Sequence[Case]) -> dict[Case, float]:
    return {case: case.tokens_in_all / bench.run(case) for case in cases}


@contextlib.contextmanager
def busy_programs(n: int) -> Iterator[None]:
    """n programs that want a whole core each for as long as this lasts."""
    loops = []
    try:
        for _ in range(n):
            loops.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
        if n:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-peers", *sys.argv[1:]])
