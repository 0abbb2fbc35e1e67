"""Records of a load as a table for a terminal.
Owns its layout; must not know how anything was measured."""

from __future__ import annotations

from collections.abc import Sequence

from martlet.scripts.bench_report import significant, table
from martlet.scripts.records import Record

# title, figure, factor
COLUMNS = (
    ("out tok/s", "output_tokens_per_s", 1.0),
    ("in tok/s", "input_tokens_per_s", 1.0),
    ("ttft p50", "ttft_ms.p50", 1.0),
    ("p95", "ttft_ms.p95", 1.0),
    ("tpot p50", "tpot_ms.p50", 1.0),
    ("p95", "tpot_ms.p95", 1.0),
    ("gap p99", "step_gap_ms.p99", 1.0),
    ("max", "step_gap_ms.max", 1.0),
    ("e2e p50", "end_to_end_ms.p50", 1.0),
    ("p95", "end_to_end_ms.p95", 1.0),
)
MACHINE = ("cpu", "isa", "cores", "quota", "governor", "load_before", "os")
WORK = ("prompt_tokens", "output_tokens", "prefix_tokens", "turns", "cache", "requests", "repeats")
BUSY = 0.5  # programs a core that wanted to run before ours did


def as_text(records: Sequence[Record]) -> str:
    first = records[0]
    lines = [told(first, MACHINE), told(first, WORK), ""]
    rows = []
    for record in records:
        row = [f"{record.label}, {record.conditions['load']}"]
        for _, name, factor in COLUMNS:
            figure = record.figures.get(name)
            row.append(significant(factor * figure.median) if figure else "-")
        rows.append((*row, spread(record)))
    header = ("side, load", *(title for title, *_ in COLUMNS), "spread")
    lines += table(header, rows)
    lines += [
        "",
        f"medians of {first.conditions['repeats']} runs; times in ms; spread: (max - min) / median"
        " of out tok/s; definitions: docs/metrics.md",
    ]
    lines += dict.fromkeys(remark for record in records for remark in remarks(record))
    return "\n".join(lines)


def told(record: Record, names: Sequence[str]) -> str:
    known = (name for name in names if name in record.conditions)
    return " · ".join(f"{name.replace('_', ' ')} {record.conditions[name]}" for name in known)


def spread(record: Record) -> str:
    figure = record.figures.get("output_tokens_per_s")
    if figure is None or len(figure.samples) < 2 or not figure.median:
        return "-"
    return f"{(max(figure.samples) - min(figure.samples)) / figure.median:.0%}"


def remarks(record: Record) -> list[str]:
    """What somebody who reads the figures has to know."""
    where, found = f"{record.label}, {record.conditions['load']}: ", []
    figures = record.figures
    if record.details.get("objectives") and "goodput.share" in figures:
        limits = ", ".join(f"{n} {v:g}" for n, v in record.details["objectives"].items())
        good = figures["goodput.requests_per_s"].median
        share = figures["goodput.share"].median
        found.append(f"{where}goodput {good:.3g} requests/s ({share:.0%}) within {limits}")
    if figures["ended_badly"].median:
        found.append(f"{where}{figures['ended_badly'].median:g} requests a run ended badly")
    late, ttft = figures["client_late_ms.max"].median, figures.get("ttft_ms.p50")
    if ttft and late > 0.1 * ttft.median:
        found.append(f"{where}the client sent up to {late:.0f} ms late: it had no core")
    cached = figures.get("cached_share")
    is_new = record.conditions["cache"] == "cold" and record.conditions["turns"] == 1
    if cached and is_new and not record.conditions["prefix_tokens"] and cached.median > 0.05:
        found.append(f"{where}{cached.median:.0%} of prompt tokens were cached")
    load, cores = record.conditions.get("load_before"), record.conditions.get("cores")
    if load is not None and cores and load > BUSY * cores:
        found.append(f"the machine was busy before (load average {load} on {cores} cores)")
    return found
