"""What `martlet bench --json` has measured, beside what is calculated of the same model.
Owns reading and checking a record, and the measured end of being bound by memory; must not know how
anything is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from martlet.runtime.work import Speed
from martlet.scripts.bench_cases import Case
from martlet.scripts.errors import ComparisonError
from martlet.scripts.explain_model import Subject

NEARLY_ALL = 0.95  # of the largest measured batch: where it then ends was not seen


@dataclass(frozen=True)
class Measured:
    """Repeated seconds of one case, in the order of the repeats."""

    case: Case
    seconds: tuple[float, ...]
    median_s: float
    tokens_per_s: float  # the median of the repeats' own


@dataclass(frozen=True)
class Record:
    path: Path
    date: str
    executor: str  # with its ISA and threads
    weight_bytes: int
    speed: Speed | None
    step_rows: int
    cases: tuple[Measured, ...]

    def find(self, case: Case) -> Measured | None:
        return next((each for each in self.cases if each.case == case), None)

    def decodes(self, depth: int) -> list[Measured]:
        """By the number of sequences."""
        found = [m for m in self.cases if m.case.kind == "decode" and m.case.depth == depth]
        return sorted(found, key=lambda each: each.case.n_seqs)

    @property
    def depths(self) -> list[int]:
        return sorted({m.case.depth for m in self.cases if m.case.kind == "decode"})


def read_record(path: Path) -> Record:
    """Raises ComparisonError for what is no record of `martlet bench --json`."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        return record_of(path, given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise ComparisonError(
            f"{path} is no record of `martlet bench --json` ({kind}); write one with "
            "`martlet bench MODEL --json > record.json`"
        ) from None


def record_of(path: Path, given: dict[str, Any]) -> Record:
    limits = {name: figure["median"] for name, figure in given["limits_per_s"].items()}
    speed = None
    if limits:
        read = max(limits["read_bytes"], limits["read_bytes_model_size"])
        speed = Speed(limits["int8_macs"], limits["f32_macs"], read)
    isa = f" {given['isa']}" if given["isa"] else ""
    return Record(
        path=path,
        date=given["date"],
        executor=f"{given['executor']}{isa}, {given['threads']} threads",
        weight_bytes=given["model"]["weight_bytes_per_step"],
        speed=speed,
        step_rows=given["step_rows"],
        cases=tuple(measured_of(case) for case in given["cases"]),
    )


def measured_of(given: dict[str, Any]) -> Measured:
    case = Case(given["kind"], given["n_tokens"], given["depth"], given["n_seqs"])
    seconds = given["seconds"]
    samples = tuple(map(float, seconds["samples"]))
    return Measured(case, samples, float(seconds["median"]), given["tokens_per_s"]["median"])


def check_same_model(record: Record, weight_bytes: int) -> None:
    """A model is known by the bytes that one step reads of it."""
    if record.weight_bytes != weight_bytes:
        raise ComparisonError(
            f"{record.path} is of another model: a step there reads {record.weight_bytes:,} bytes "
            f"of weights, here {weight_bytes:,}; give the record of this file"
        )


@dataclass(frozen=True)
class Crossing:
    """Sequences from which on decoding together was not bound by memory, over the repeats."""

    depth: int
    n_seqs: float
    low: float
    high: float
    is_beyond: bool
    """Up to the largest batch that was measured, it still was."""


def crossings(record: Record, subject: Subject) -> list[Crossing]:
    """Of every depth at which more than one batch was measured."""
    found = []
    for depth in record.depths:
        decodes = record.decodes(depth)
        if len(decodes) < 2 or decodes[0].case.n_seqs != 1:
            continue
        medians = crossing([(m.case, m.median_s) for m in decodes], subject)
        repeats = zip(*(m.seconds for m in decodes), strict=True)
        each = [crossing([(m.case, s) for m, s in zip(decodes, turn, strict=True)], subject)
                for turn in repeats]  # fmt: skip
        most = decodes[-1].case.n_seqs
        beyond = medians >= NEARLY_ALL * most
        found.append(Crossing(depth, medians, min(each), max(each), beyond))
    return found


def crossing(seconds: Sequence[tuple[Case, float]], subject: Subject) -> float:
    """Where two lines meet: what n sequences would take if only their bytes did, read as fast as
    those of one sequence were, and n times the least that a sequence has taken in any batch.

    The first case is that of one sequence. Calculated in the same way from the machine's limits it
    is the crossing of the roofline."""
    (alone, alone_s), *_ = seconds
    one, two = subject.bound(alone), subject.bound(with_sequences(alone, 2))
    per_byte = alone_s / one.work.n_bytes
    more_s = (two.work.n_bytes - one.work.n_bytes) * per_byte
    row_s = min(s / case.n_seqs for case, s in seconds)
    return (alone_s - more_s) / (row_s - more_s) if row_s > more_s else float("inf")


def with_sequences(case: Case, n_seqs: int) -> Case:
    return Case(case.kind, case.n_tokens, case.depth, n_seqs)
