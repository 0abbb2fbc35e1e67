"""Which records may be ranked against each other, and why others may not.
Owns the conditions that must be known and alike; must not know statistics or layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from martlet.scripts.records import Figure, Record

# What a figure means nothing without, whoever made it.
MACHINE = ("cpu", "isa", "cores", "quota", "memory_bytes", "os", "governor")
MODEL = ("model_sha256", "model_type", "kv_type")
RUN = ("threads", "cache")
WORK = ("prompt_tokens", "output_tokens", "load")
MUST_KNOW = (*MACHINE, *MODEL, *RUN, *WORK)
# What is compared, and what follows from it.
SUBJECTS = ("engine", "versions", "flags", "transport", "context", "executor", "engine_isa")
# Told, and different from one session to the next by nature.
INCIDENTAL = ("load_before", "seed", "repeats", "model_file")
LEAST_REPEATS = 3  # of two, a chance in twenty is one that happens


@dataclass(frozen=True)
class Problem:
    """In words, and the condition it is about, if one."""

    text: str
    condition: str | None = None
    is_missing: bool = False


def problems(figure: str, records: Sequence[Record], varies: Iterable[str] = ()) -> list[Problem]:
    """Why this figure of these records cannot be ranked; nothing if it can. varies: conditions
    that are what is compared."""
    found = [problem for record in records for problem in _alone(figure, record)]
    allowed = {*varies, *SUBJECTS, *INCIDENTAL}
    known = [record.conditions_of(figure) for record in records]
    names = dict.fromkeys([*MUST_KNOW, *(name for each in known for name in each)])
    for name in names:
        values = [each.get(name) for each in known]
        without = [r.label for r, value in zip(records, values, strict=True) if value is None]
        if without and name in MUST_KNOW:
            text = f"{name} is not known of {', '.join(dict.fromkeys(without))}"
            found.append(Problem(text, name, is_missing=True))
        different = list(dict.fromkeys(str(value) for value in values if value is not None))
        if len(different) > 1 and name not in allowed:
            found.append(Problem(f"{name} differs: {' / '.join(different)}", name))
        elif without and len(without) < len(records) and name not in (*allowed, *MUST_KNOW):
            found.append(Problem(f"{name} is only known of some: {different[0]}", name, True))
    return found


def _alone(name: str, record: Record) -> Iterable[Problem]:
    figure: Figure = record.figures[name]
    if figure.grade != "measured":
        yield Problem(f"{record.label} is {figure.grade}; only measured figures are ranked")
    elif len(figure.samples) < LEAST_REPEATS:
        n = len(figure.samples)
        text = f"{n} repeat{'s' * (n > 1)}, at least {LEAST_REPEATS} are needed to know its spread"
        yield Problem(f"{record.label} has {text}")
    if min(figure.samples) <= 0:
        yield Problem(f"{record.label} is not above 0 in every repeat: it has no ratio")


def shared_figures(records: Sequence[Record]) -> list[str]:
    first, *others = records
    return [name for name in first.figures if all(name in each.figures for each in others)]


def offers(figure: str, records: Sequence[Record], varies: Sequence[str]) -> list[str]:
    """Comparisons of the same records that are valid."""
    found = []
    for pair in combinations(range(len(records)), 2):
        if len(records) > 2 and not problems(figure, [records[i] for i in pair], varies):
            a, b = (f"{i + 1} ({records[i].label})" for i in pair)
            found.append(f"only records {a} and {b}")
    for_all = problems(figure, records, varies)
    conditions = {problem.condition for problem in for_all}
    if None not in conditions and not any(problem.is_missing for problem in for_all):
        names = sorted(name for name in conditions if name)
        if len(names) == 1:
            found.append(f"--varies {names[0]}: then {names[0]} is what is compared")
    return found
