"""Records of measurements: figures with their grade, samples and conditions, as JSON files.
Owns the form of a record and reading it; must not know how anything was measured or is compared."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from martlet.quant.errors import MartletError
from martlet.scripts.console import without_nan

Grade = Literal["measured", "calculated", "vendor-reported", "inferred"]
GRADES: tuple[Grade, ...] = get_args(Grade)
FORM = "martlet record 1"


class RecordError(MartletError):
    """A file that is no record, or a record that says too little."""


@dataclass(frozen=True)
class Figure:
    """One value per repeat."""

    samples: tuple[float, ...]
    unit: str
    grade: Grade = "measured"
    is_higher_better: bool = True
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Its own, beside those of the record."""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        spread = {"median": self.median, "min": min(self.samples), "max": max(self.samples)}
        return {**asdict(self), "samples": list(self.samples), **spread}


@dataclass(frozen=True)
class Record:
    """What one side did under one set of conditions."""

    label: str
    conditions: Mapping[str, Any]
    figures: Mapping[str, Figure]
    session: str = ""
    """Of one session, repeat i of one record ran beside repeat i of another, in turns."""
    source: str = ""
    """Where it is from, if it was not measured here."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Requests and whatever else a report shows."""

    def conditions_of(self, name: str) -> dict[str, Any]:
        return {**self.conditions, **self.figures[name].conditions}

    def as_json(self) -> dict[str, Any]:
        figures = {name: figure.as_json() for name, figure in self.figures.items()}
        fields = {"label": self.label, "session": self.session, "source": self.source}
        about = {"conditions": dict(self.conditions), "figures": figures}
        return {**fields, **about, "details": dict(self.details)}


def as_json(records: Sequence[Record], **others: Any) -> dict[str, Any]:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    told = [record.as_json() for record in records]
    return {"form": FORM, "date": date, **others, "records": told}


def write_records(path: Path, records: Sequence[Record], **others: Any) -> None:
    part = path.with_name(path.name + ".part")
    text = json.dumps(without_nan(as_json(records, **others)), allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read_records(path: Path) -> list[Record]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or given.get("form") != FORM:
            raise RecordError(f"{path} is not of the form {FORM!r}")
        return [_record(each) for each in given["records"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is no record: {error!r}") from None


def _record(given: Mapping[str, Any]) -> Record:
    figures = {name: _figure(name, each) for name, each in given["figures"].items()}
    return Record(
        str(given["label"]),
        dict(given["conditions"]),
        figures,
        str(given.get("session", "")),
        str(given.get("source", "")),
        dict(given.get("details", {})),
    )


def _figure(name: str, given: Mapping[str, Any]) -> Figure:
    if given["grade"] not in GRADES:
        raise RecordError(f"{name} has the grade {given['grade']!r}; there are {', '.join(GRADES)}")
    samples = tuple(float(each) for each in given["samples"])
    if not samples:
        raise RecordError(f"{name} has no samples")
    return Figure(
        samples,
        str(given["unit"]),
        given["grade"],
        bool(given["is_higher_better"]),
        dict(given.get("conditions", {})),
    )
