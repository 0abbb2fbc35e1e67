"""What `martlet explain` says, as one JSON object or as text for a person.
Owns units, words and layout, and what stands beside what; must not know how figures come about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from martlet.runtime.work import Speed
from martlet.scripts.bench_report import GIGA, significant, table
from martlet.scripts.explain_model import ACCEPTANCES, Bound, Context, Guess, Variant
from martlet.scripts.explain_record import Crossing, Measured, Record

MEGA = 1e6
GRADES = {
    "calculated": "from the model's plan and the limits above: no kernel here can do better",
    "measured": "medians of the record, on its machine",
}
NEVER = "none"
BOUND_HEADER = ("case", "MMAC", "MB", "MAC/B", "multiply", "memory", "at most", "binds")


@dataclass(frozen=True)
class Line:
    """A case as calculated, and as measured where a record has it."""

    bound: Bound
    measured: Measured | None


@dataclass(frozen=True)
class Knee:
    """Sequences from which on decoding together is bound by multiplying, at one context."""

    context: int
    calculated: int | None
    measured: Crossing | None


@dataclass(frozen=True)
class Report:
    model: dict[str, Any]
    kv_type: str
    step_rows: int
    speed: Speed
    speed_from: str
    record: Record | None
    lines: Sequence[Line]
    knees: Sequence[Knee]
    contexts: Sequence[Context]
    variants: Sequence[Variant]
    guesses: Sequence[Guess]
    context: int
    """Of variants and guesses."""

    def cost_measured(self, n_rows: int) -> float | None:
        """A step of so many sequences, in steps of one, at the least depth of the record."""
        if self.record is None or not self.record.depths:
            return None
        found = {m.case.n_seqs: m.median_s for m in self.record.decodes(self.record.depths[0])}
        return found[n_rows] / found[1] if {1, n_rows} <= found.keys() else None


# -- text ----------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    parts = [heading(report), bounds(report), knees(report), growth(report)]
    parts += [other_weights(report), speculation(report)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def heading(report: Report) -> list[str]:
    model, speed = report.model, report.speed
    rates = (speed.int8_macs, speed.f32_macs, speed.n_bytes)
    int8, f32, read = (significant(rate / GIGA) for rate in rates)
    lines = [
        f"{model['file']}, {model['file_bytes'] / GIGA:.3f} GB; keys and values"
        f" {report.kv_type}, prompts in steps of {report.step_rows} rows",
        f"limits {report.speed_from}: int8 {int8} GMAC/s, f32 {f32} GMAC/s, read {read} GB/s",
        f"calculated: {GRADES['calculated']}",
    ]
    if report.record:
        about = f"{report.record.path.name}, {report.record.executor}, {report.record.date}"
        lines.append(f"measured: {GRADES['measured']}: {about}")
    return lines


def bounds(report: Report) -> list[str]:
    has_measured = any(line.measured for line in report.lines)
    extra = ("measured", "of limit") if has_measured else ()
    rows = []
    for line in report.lines:
        bound, n = line.bound, line.bound.case.tokens_in_all
        cells = (
            significant(bound.work.macs / n / MEGA),
            significant(bound.work.n_bytes / n / MEGA),
            significant(bound.intensity),
            significant(n / bound.multiply_s),
            significant(n / bound.memory_s),
            significant(bound.tokens_per_s),
            bound.binds,
        )
        rows.append((bound.case.label, *cells, *(measured_cells(line) if has_measured else ())))
    title = "Per token (calculated): multiply-adds, bytes, tokens/s by each limit and at most"
    return [
        title + (", and as measured" if has_measured else ""),
        *table(BOUND_HEADER + extra, rows),
    ]


def measured_cells(line: Line) -> tuple[str, str]:
    if line.measured is None:
        return "-", "-"
    rate = line.measured.tokens_per_s
    return significant(rate), f"{line.bound.seconds / line.measured.median_s:.0%}"


def knees(report: Report) -> list[str]:
    rows = []
    for knee in report.knees:
        measured = "-"
        if knee.measured:
            found = knee.measured
            beyond = "more than " if found.is_beyond else ""
            measured = f"{beyond}{found.n_seqs:.1f} ({found.low:.1f} to {found.high:.1f})"
        calculated = NEVER if knee.calculated is None else str(knee.calculated)
        rows.append((f"context {knee.context:,}", calculated, measured))
    title = "Sequences from which on decoding together is bound by multiplying, not by memory"
    notes = []
    if any(knee.calculated is None for knee in report.knees):
        notes.append("none: every sequence brings more bytes than multiplying takes time for")
    if any(knee.measured for knee in report.knees):
        notes.append(
            "measured: where n times the least time of a sequence in any batch meets what the"
            " bytes of n take at the speed of one alone"
        )
    return [title, *table(("", "calculated", "measured"), rows), *notes]


def growth(report: Report) -> list[str]:
    rows = []
    for each in report.contexts:
        share = each.decode.work.kv_bytes / each.decode.work.n_bytes
        cells = (
            significant(each.kv_bytes / MEGA),
            f"{share:.0%}",
            significant(each.decode.tokens_per_s),
            NEVER if each.crossover is None else str(each.crossover),
        )
        rows.append((f"{each.n_tokens:,}", *cells))
    title = "Keys, values and states of one sequence as its context grows (calculated)"
    header = ("context", "MB", "of bytes read", "decode at most", "batch bound by multiplying")
    return [title, *table(header, rows)]


def other_weights(report: Report) -> list[str]:
    rows = []
    for each in report.variants:
        knee = NEVER if each.crossover is None else str(each.crossover)
        cells = (
            significant(each.weight_bytes / MEGA),
            significant(each.decode.tokens_per_s),
            each.decode.binds,
            significant(each.prefill.tokens_per_s),
            each.prefill.binds,
            knee,
        )
        rows.append((each.name, *cells))
    n = report.variants[0].prefill.case.n_tokens
    title = (
        f"Other types (calculated): tokens/s at most of decode at context {report.context:,} and"
        f" of a prefill of {n}; from how many sequences on multiplying binds"
    )
    return [title, *table(("type", "MB/step", "decode", "", "prefill", "", "batch"), rows)]


def speculation(report: Report) -> list[str]:
    costs = [report.cost_measured(1 + each.n_guessed) for each in report.guesses]
    has_measured = any(cost is not None for cost in costs)
    rows = []
    for each, cost in zip(report.guesses, costs, strict=True):
        cells = [f"{each.cost:.2f}"]
        if has_measured:
            cells.append("-" if cost is None else f"{cost:.2f}")
        least = each.break_even
        cells.append("never" if least is None else f"{least:.0%}")
        cells += [f"{each.gain(a):.2f}" for a in ACCEPTANCES]
        rows.append((f"{each.n_guessed} guessed", *cells))
    header = ["", "cost", *(["measured"] if has_measured else []), "pays from"]
    header += [f"gain at {a:.0%}" for a in ACCEPTANCES]
    title = (
        f"Guessing tokens of one sequence at context {report.context:,} (calculated, the guesses"
        " themselves free): cost in steps of one row, least acceptance, and gain"
    )
    lines = [title, *table(header, rows)]
    if has_measured:
        lines.append("measured: as many sequences in one step as that step has rows")
    return lines


# -- JSON ----------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    speed = report.speed
    record = report.record
    return {
        "grades": GRADES,
        "model": report.model,
        "kv_type": report.kv_type,
        "step_rows": report.step_rows,
        "limits_per_s": {
            "from": report.speed_from,
            "int8_macs": speed.int8_macs,
            "f32_macs": speed.f32_macs,
            "read_bytes": speed.n_bytes,
        },
        "record": record
        and {"path": str(record.path), "date": record.date, "executor": record.executor},
        "cases": [line_json(line) for line in report.lines],
        "crossovers": [knee_json(knee) for knee in report.knees],
        "contexts": [context_json(each) for each in report.contexts],
        "variants_context": report.context,
        "variants": [variant_json(each) for each in report.variants],
        "guesses": [
            guess_json(each, report.cost_measured(1 + each.n_guessed)) for each in report.guesses
        ],
    }


def line_json(line: Line) -> dict[str, Any]:
    case, measured = line.bound.case, line.measured
    return {
        "case": case.label,
        "kind": case.kind,
        "n_tokens": case.n_tokens,
        "depth": case.depth,
        "n_seqs": case.n_seqs,
        "calculated": bound_json(line.bound),
        "measured": measured
        and {
            "tokens_per_s": measured.tokens_per_s,
            "seconds": measured.median_s,
            "samples": list(measured.seconds),
            "limit_share": line.bound.seconds / measured.median_s,
        },
    }


def bound_json(bound: Bound) -> dict[str, Any]:
    work, n = bound.work, bound.case.tokens_in_all
    return {
        "macs_per_token": work.macs / n,
        "bytes_per_token": work.n_bytes / n,
        "int8_macs": work.int8_macs,
        "f32_macs": work.f32_macs,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "macs_per_byte": bound.intensity,
        "multiply_seconds": bound.multiply_s,
        "memory_seconds": bound.memory_s,
        "binds": bound.binds,
        "tokens_per_s": bound.tokens_per_s,
    }


def knee_json(knee: Knee) -> dict[str, Any]:
    found = knee.measured
    return {
        "context": knee.context,
        "calculated": knee.calculated,
        "measured": found
        and {
            "n_seqs": found.n_seqs,
            "min": found.low,
            "max": found.high,
            "is_beyond_the_largest_batch": found.is_beyond,
        },
    }


def context_json(each: Context) -> dict[str, Any]:
    calculated = {
        "kv_bytes": each.kv_bytes,
        "decode": bound_json(each.decode),
        "crossover": each.crossover,
    }
    return {"context": each.n_tokens, "calculated": calculated}


def variant_json(each: Variant) -> dict[str, Any]:
    calculated = {
        "weight_bytes": each.weight_bytes,
        "decode": bound_json(each.decode),
        "prefill": bound_json(each.prefill),
        "crossover": each.crossover,
    }
    return {"type": each.name, "calculated": calculated}


def guess_json(each: Guess, cost: float | None) -> dict[str, Any]:
    calculated = {
        "cost": each.cost,
        "break_even_acceptance": each.break_even,
        "gain": {str(a): each.gain(a) for a in ACCEPTANCES},
    }
    measured = None if cost is None else {"cost": cost}
    return {"n_guessed": each.n_guessed, "calculated": calculated, "measured": measured}
