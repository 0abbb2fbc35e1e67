"""`martlet bench-compare`: ranks records where they can be compared, and says why not elsewhere.
Owns the command, ranks and words; rules are in compare_rules.py, statistics in intervals.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.scripts import options
from martlet.scripts.console import EXIT_ERROR, print_json

if TYPE_CHECKING:
    from martlet.scripts.intervals import Ratio
    from martlet.scripts.records import Record

CONFIDENCE = 0.95
USUAL = ("tokens_per_s", "output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50", "end_to_end_ms.p50")


def bench_compare(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Of --out, or bench-record.")
    ],
    figure: Annotated[
        list[str] | None,
        typer.Option(help="Or `all`. Default: throughput and medians."),
    ] = None,
    load: Annotated[
        list[str] | None, typer.Option(help="Only records of this load, as '8 streams'.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Only records so labelled.")] = None,
    varies: Annotated[
        list[str] | None, typer.Option(help="A condition that is what is compared; repeatable.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Rank measured records, or say what is missing or different. Exit code 1: nothing ranked."""
    from martlet.scripts.records import RecordError, read_records

    records = [record for path in files for record in read_records(path)]
    records = [each for each in records if _is_wanted(each, load, label)]
    if len(records) < 2:
        raise RecordError(f"{len(records)} record is nothing to compare; give two or more")
    found = [
        verdict
        for group in by_load(records)
        for verdict in verdicts(group, figure or (), varies or ())
    ]
    if as_json:
        print_json({"confidence": CONFIDENCE, "verdicts": [each.as_json() for each in found]})
    else:
        print("\n\n".join(each.as_text() for each in found))
    if not any(each.ranking for each in found):
        raise typer.Exit(EXIT_ERROR)


def _is_wanted(record: Record, load: list[str] | None, label: list[str] | None) -> bool:
    told = record.conditions.get("load")
    return (not load or told in load) and (not label or record.label in label)


def by_load(records: Sequence[Record]) -> list[list[Record]]:
    """A file with several loads holds several comparisons; a load that only one has stays with
    the others, so that the difference is told."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record.conditions.get("load"), []).append(record)
    if all(len(group) > 1 for group in groups.values()):
        return list(groups.values())
    return [list(records)]


@dataclass(frozen=True)
class Place:
    """1 for what nobody is surely better than."""

    place: int
    number: int
    record: Record
    to_best: Ratio | None
    """It ÷ the first of the ranking; None of that one itself."""


@dataclass(frozen=True)
class Verdict:
    """On one figure of some records: a ranking, or what stands against one."""

    figure: str
    records: Sequence[Record]
    ranking: Sequence[Place]
    against: Sequence[str]
    instead: Sequence[str]

    @property
    def title(self) -> str:
        loads = dict.fromkeys(str(each.conditions.get("load", "?")) for each in self.records)
        return f"{self.figure} ({' / '.join(loads)})"

    def as_text(self) -> str:
        if not self.ranking:
            lines = [f"{self.title}: not ranked"]
            lines += [f"  {n}: {_told(each, self.figure)}" for n, each in _numbered(self.records)]
            lines += [f"  because {reason}" for reason in self.against]
            return "\n".join([*lines, *(f"  valid: {offer}" for offer in self.instead)])
        figure = self.records[0].figures[self.figure]
        direction = "more" if figure.is_higher_better else "less"
        lines = [f"{self.title}, {direction} is better"]
        for each in self.ranking:
            line = f"  {each.place}. {_told(each.record, self.figure)}"
            if each.to_best:
                r = each.to_best
                word = "tie with the first: " if each.place == 1 else ""
                line += f"; {word}{r.value:.3f} of it ({r.low:.3f} to {r.high:.3f})"
            lines.append(line)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "load": [each.conditions.get("load") for each in self.records],
            "ranking": [
                {
                    "place": each.place,
                    "record": each.number,
                    "label": each.record.label,
                    "median": each.record.figures[self.figure].median,
                    "ratio_to_first": each.to_best and vars(each.to_best),
                }
                for each in self.ranking
            ],
            "refused_because": list(self.against),
            "valid_instead": list(self.instead),
        }


def _numbered(records: Sequence[Record]) -> list[tuple[int, Record]]:
    return list(enumerate(records, 1))


def _told(record: Record, name: str) -> str:
    figure = record.figures[name]
    n = len(figure.samples)
    spread = f", {min(figure.samples):.4g} to {max(figure.samples):.4g} in {n}" if n > 1 else ""
    return f"{record.label}: {figure.median:.4g} {figure.unit} ({figure.grade}{spread})"


def verdicts(
    records: Sequence[Record], wanted: Sequence[str], varies: Sequence[str]
) -> list[Verdict]:
    from martlet.scripts.compare_rules import offers, problems, shared_figures
    from martlet.scripts.records import RecordError

    shared = shared_figures(records)
    names = [*shared] if "all" in wanted else [name for name in wanted or USUAL if name in shared]
    if not names:
        told = ", ".join(shared) or "none"
        raise RecordError(f"no such figure is in all records; they share: {told}")
    found = []
    for name in names:
        against = [problem.text for problem in problems(name, records, varies)]
        ranking = [] if against else rank(name, records)
        instead = offers(name, records, varies) if against else []
        found.append(Verdict(name, records, ranking, against, instead))
    return found


def rank(name: str, records: Sequence[Record]) -> list[Place]:
    """A place is one more than the number of records that are surely better. All pairs hold
    together with the confidence (Bonferroni)."""
    n_pairs = len(records) * (len(records) - 1) // 2
    confidence = 1 - (1 - CONFIDENCE) / n_pairs
    figures = [record.figures[name] for record in records]
    sign = 1 if figures[0].is_higher_better else -1
    better = [0] * len(records)
    for a, b in combinations(range(len(records)), 2):
        ratio = ratio_of(name, records[a], records[b], confidence)
        if not ratio.is_tie:
            is_first_better = (ratio.value > 1) == (sign > 0)
            better[b if is_first_better else a] += 1
    order = sorted(range(len(records)), key=lambda i: (better[i], -sign * figures[i].median))
    first = order[0]
    return [
        Place(
            better[i] + 1,
            i + 1,
            records[i],
            None if i == first else ratio_of(name, records[i], records[first], confidence),
        )
        for i in order
    ]


def ratio_of(name: str, a: Record, b: Record, confidence: float) -> Ratio:
    """Of one session, whose repeats ran side by side, pair by pair."""
    from martlet.scripts.intervals import ratio

    first, second = a.figures[name].samples, b.figures[name].samples
    is_paired = bool(a.session) and a.session == b.session and len(first) == len(second)
    return ratio(first, second, is_paired=is_paired, confidence=confidence)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-compare", *sys.argv[1:]])
