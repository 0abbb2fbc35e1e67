"""`martlet bench-record`: somebody's published figures as a record, with what they left out.
Owns the command; the form of a record is in records.py."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from martlet.scripts.console import note

UNITS = {"_per_s": "tokens/s", "_ms": "ms", "_s": "s", "_bytes": "bytes"}


class GradeName(str, Enum):
    vendor_reported = "vendor-reported"
    measured = "measured"
    calculated = "calculated"
    inferred = "inferred"


def bench_record(
    out: Annotated[Path, typer.Argument(dir_okay=False, help="The file to write.")],
    label: Annotated[str, typer.Option(help="What the figures are of.")],
    source: Annotated[str, typer.Option(help="Where they stand: a page, a paper, a log.")],
    figure: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE[,VALUE]",
            help="As output_tokens_per_s=41.5 or ttft_ms.p50=80,82,81, a value per repeat.",
        ),
    ],
    grade: GradeName = GradeName.vendor_reported,
    condition: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What the source tells: cpu=…, threads=8."),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep what the file holds.")] = False,
) -> None:
    """Write figures that were not measured here as a record, and say which conditions they lack."""
    from martlet.scripts.bench_serve import pair
    from martlet.scripts.compare_rules import MUST_KNOW
    from martlet.scripts.records import Figure, Record, RecordError, read_records, write_records

    if out.exists() and not append:
        raise RecordError(f"{out} exists; --append adds to it")
    figures = {}
    for text in figure:
        name, values = pair(text, "--figure")
        figures[name] = Figure(numbers(values), unit_of(name), grade.value, not is_time(name))
    known = {n: value_of(v) for n, v in (pair(each, "--condition") for each in condition or ())}
    record = Record(label, known, figures, source=source)
    write_records(out, [*(read_records(out) if out.exists() else ()), record])
    missing = [name for name in MUST_KNOW if name not in known]
    note(f"{out}: {grade.value}, {len(figures)} figures")
    if missing:
        note(f"not told: {', '.join(missing)}; it cannot be ranked against what was measured")


def unit_of(name: str) -> str:
    stem = name.partition(".")[0]
    return next((unit for end, unit in UNITS.items() if stem.endswith(end)), "")


def is_time(name: str) -> bool:
    return unit_of(name) in ("ms", "s", "bytes")


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number, or several as in 80,82,81.") from None


def value_of(text: str) -> Any:
    """As a measurement here would have it: a whole number is one."""
    return int(text) if text.isdecimal() else text


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-record", *sys.argv[1:]])
