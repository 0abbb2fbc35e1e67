"""The results of a benchmark as one JSON object or as a table for a person.
Owns units and layout; must not know how anything was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from martlet.scripts import records
from martlet.scripts.bench_measure import Figure, Limits, Result

GIGA = 1e9
_LIMIT_NAMES = {
    "int8_macs": ("int8", "GMAC/s"),
    "f32_macs": ("f32", "GMAC/s"),
    "read_bytes": ("read, 2 MB pages", "GB/s"),
    "read_bytes_small_pages": ("read, 4 KB pages", "GB/s"),
    "read_bytes_model_size": ("read, as many bytes as a step's weights", "GB/s"),
}
HEADER = ("case", "tokens/s", "min", "max", "GMAC/s", "GB/s", "of limit")


def as_json(facts: dict[str, Any], limits: Limits, results: Sequence[Result]) -> dict[str, Any]:
    return {
        **facts,
        "limits_per_s": {name: figure_json(f) for name, f in limits.figures().items()},
        "cases": [case_json(result, limits) for result in results],
    }


def as_records(
    facts: dict[str, Any], conditions: dict[str, Any], results: Sequence[Result]
) -> list[records.Record]:
    """One for each case, for `martlet bench-compare`."""
    label = f"martlet {facts['martlet']}, {facts['model']['file']}"
    about = {"engine": "martlet", "executor": facts["executor"], "engine_isa": facts["isa"]}
    about |= {"threads": facts["threads"], "kv_type": "f16", "step_rows": facts["step_rows"]}
    return [
        records.Record(
            label,
            {**conditions, **about, **case_conditions(result)},
            {"tokens_per_s": records.Figure(result.tokens_per_s.samples, "tokens/s")},
        )
        for result in results
    ]


def case_conditions(result: Result) -> dict[str, Any]:
    case = result.case
    is_prefill = case.kind == "prefill"
    return {
        "load": case.label,
        "prompt_tokens": case.depth + case.n_tokens if is_prefill else case.depth,
        "output_tokens": 0 if is_prefill else case.n_tokens,
        "cache": f"filled to {case.depth}",
        "repeats": len(result.seconds.samples),
    }


def figure_json(figure: Figure) -> dict[str, Any]:
    return {
        "median": figure.median,
        "min": figure.low,
        "max": figure.high,
        "samples": list(figure.samples),
    }


def case_json(result: Result, limits: Limits) -> dict[str, Any]:
    case, work, share = result.case, result.work, result.share(limits.speed())
    return {
        "case": case.label,
        "kind": case.kind,
        "n_tokens": case.n_tokens,
        "depth": case.depth,
        "n_seqs": case.n_seqs,
        "tokens_per_s": figure_json(result.tokens_per_s),
        "seconds": figure_json(result.seconds),
        "int8_macs": work.int8_macs,
        "f32_macs": work.f32_macs,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "gmac_per_s": result.macs_per_s / GIGA,
        "gb_per_s": result.bytes_per_s / GIGA,
        "limit_share": share.of_limit if share else None,
        "limit_binds": share.binds if share else None,
    }


def as_text(facts: dict[str, Any], limits: Limits, results: Sequence[Result]) -> str:
    speed = limits.speed()
    rows = []
    for result in results:
        t, share = result.tokens_per_s, result.share(speed)
        of_limit = f"{share.of_limit:.0%} {share.binds}" if share else "-"
        numbers = (result.macs_per_s / GIGA, result.bytes_per_s / GIGA)
        speeds = (significant(v) for v in (t.median, t.low, t.high, *numbers))
        rows.append((result.case.label, *speeds, of_limit))
    return "\n".join([*heading(facts), *limit_lines(facts, limits), "", *table(HEADER, rows)])


def heading(facts: dict[str, Any]) -> list[str]:
    model, machine = facts["model"], facts["machine"]
    isa = f" {facts['isa']}" if facts["isa"] else ""
    return [
        f"martlet {facts['martlet']} · {facts['executor']}{isa}, {facts['threads']} threads"
        f" ({facts['threads_reason']}) · {facts['date']}",
        f"{machine['cpu']} · {machine['system']} · Python {machine['python']},"
        f" NumPy {machine['numpy']}",
        f"{model['file']} ({model['name']}), {model['file_bytes'] / GIGA:.3f} GB,"
        f" {model['weight_bytes_per_step'] / GIGA:.3f} GB of weights per step,"
        f" up to {facts['step_rows']} rows per step",
    ]


def limit_lines(facts: dict[str, Any], limits: Limits) -> list[str]:
    figures = limits.figures()
    if not figures:
        return ["limits: not measured"]
    buffer = facts["limit_buffer_bytes"] / GIGA
    lines = [f"limits of this run (reads over {buffer:.2f} GB unless told):"]
    for name, (title, unit) in _LIMIT_NAMES.items():
        f = figures[name]
        numbers = (significant(v / GIGA) for v in (f.median, f.low, f.high))
        lines.append("  {}: {} {unit} ({} to {})".format(title, *numbers, unit=unit))
    return lines


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        first, *others = (cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        numbers = (cell.strip().rjust(w) for cell, w in zip(others, widths[1:], strict=True))
        return "  ".join([first, *numbers]).rstrip()

    return [aligned(line) for line in lines]


def significant(value: float) -> str:
    """Three digits that mean something: 1234, 123, 12.3, 1.23."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"
