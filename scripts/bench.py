"""`martlet bench`: how fast a model runs here, beside what this machine could do at best.
Owns the command; the cases, the counting and the report are in the bench_*.py files beside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import print_json

if TYPE_CHECKING:
    from martlet.scripts.bench_cases import Case

PrefillOption = Annotated[int, typer.Option(min=0, help="Rows of a prefill; 0: none.")]
DecodeOption = Annotated[int, typer.Option(min=0, help="Steps of a decode; 0: none.")]
BatchOption = Annotated[str, typer.Option(help="Sequences that decode together.")]
DepthOption = Annotated[str, typer.Option(help="Tokens already in the KV cache.")]
RepeatOption = Annotated[int, typer.Option(min=1, help="Repeats; the median counts.")]
IsaOption = Annotated[str | None, typer.Option(help="Kernels of the native executor.")]
StepRowsOption = Annotated[int, typer.Option(min=1, help="Rows of one step at most.")]
ReadMbOption = Annotated[
    int | None,
    typer.Option(min=64, help="Buffer of the read limit, twice; default 1074, less in little RAM."),
]


def bench(
    model: options.ModelArgument,
    prefill: PrefillOption = 512,
    decode: DecodeOption = 64,
    batch: BatchOption = "1,2,4,8,16",
    depth: DepthOption = "0,2048",
    threads: options.ThreadsOption = None,
    repeat: RepeatOption = 5,
    executor: options.ExecutorOption = options.ExecutorName.auto,
    isa: IsaOption = None,
    step_rows: StepRowsOption = 256,
    read_mb: ReadMbOption = None,
    repack: options.RepackOption = None,
    trace: options.TraceOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Speed of MODEL, and its share of this machine's limits measured in the same run."""
    from martlet.scripts import bench_report, records
    from martlet.scripts.bench_measure import measure
    from martlet.scripts.bench_open import Options, open_bench
    from martlet.scripts.conditions import file_conditions, machine_conditions, martlet_versions
    from martlet.scripts.tracing import open_trace

    cases = cases_of(prefill, decode, batch, depth)
    chosen = Options(executor.value, threads, isa, step_rows, mega(read_mb), repack)
    machine = machine_conditions()  # before we load it ourselves
    with open_trace(trace) as written, open_bench(model, cases, chosen, written) as opened:
        results = measure(opened.bench, opened.plan, cases, opened.limits, repeat, tell)
    if as_json:
        known = {**machine, **file_conditions(opened.path), **martlet_versions()}
        kept = bench_report.as_records(opened.facts, known, results)
        told = bench_report.as_json(opened.facts, opened.limits, results)
        print_json(records.as_json(kept, **told))
    else:
        print(bench_report.as_text(opened.facts, opened.limits, results))


def cases_of(prefill: int, decode: int, batch: str, depth: str) -> list[Case]:
    """As the options of the command line give them."""
    from martlet.scripts.bench_cases import make_cases

    batches, depths = whole_numbers(batch, "--batch", 1), whole_numbers(depth, "--depth", 0)
    return make_cases(prefill, decode, batches, depths)


def mega(value: int | None) -> int | None:
    return None if value is None else value * 1_000_000


def tell(what: str) -> None:
    """One line that is written over; nothing runs beside the measurement to keep it moving."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what:<60}\r")
        sys.stderr.flush()


def whole_numbers(text: str, name: str, least: int) -> list[int]:
    """`1,2,8` -> [1, 2, 8]"""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{name} is {text!r}, expected numbers from {least} as in 1,2,8.")
    return [int(part) for part in parts]


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench", *sys.argv[1:]])
