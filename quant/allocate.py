"""Which format each tensor gets, under a budget of bytes for all of them.

Owns: the choice, as a multiple-choice knapsack. Must not know: how costs were found, tensors'
values, files. Costs of different tensors add up: they are expected KL divergence, or anything else
that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import fsum, inf

from .errors import MartletError


class BudgetTooSmall(MartletError):
    """Even the smallest format of every tensor takes more bytes than there are."""


@dataclass(frozen=True)
class Choice:
    """A format a tensor may have: what it takes, and what it costs in quality."""

    format: str
    n_bytes: int
    cost: float


def efficient(choices: Sequence[Choice]) -> list[Choice]:
    """Those on the lower convex hull of cost over bytes, by rising bytes."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.n_bytes, c.cost, c.format)):
        if hull and choice.cost >= hull[-1].cost:
            continue  # more bytes for nothing
        while len(hull) > 1 and _gain(hull[-1], choice) >= _gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def allocate(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """One choice for every tensor, the sum of n_bytes at most `budget`, of nearly least cost.

    The largest tensor, often an embedding of most of a model, is given each of its choices in turn,
    since one step of it may take more bytes than all others have to spare. Raises BudgetTooSmall
    with the least that is possible.
    """
    least = sum(min(c.n_bytes for c in options) for options in choices.values())
    if budget < least:
        raise BudgetTooSmall(
            f"{budget} bytes for weights are too few: {least} is the least; allow more"
        )
    if not choices:
        return {}
    largest = max(choices, key=lambda name: (max(c.n_bytes for c in choices[name]), name))
    spare = budget - least + min(c.n_bytes for c in choices[largest])
    found = [
        _greedy({**choices, largest: [choice]}, budget)
        for choice in choices[largest]
        if choice.n_bytes <= spare
    ]
    return min(found, key=lambda each: (fsum(c.cost for c in each.values()), each[largest].cost))


def _greedy(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """From the smallest format of each on, the step of the largest gain per byte is taken as long
    as it fits: the best for its own number of bytes (Everett 1963), and short of the optimum for
    the budget by less than one step.
    """
    hulls = {name: efficient(options) for name, options in choices.items()}
    chosen = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].n_bytes for hull in hulls.values())
    steps = [step for name, hull in hulls.items() if (step := _step(name, hull, 0))]
    heapify(steps)
    while steps:
        _, name, at = heappop(steps)
        hull = hulls[name]
        extra = hull[at].n_bytes - hull[chosen[name]].n_bytes
        if extra > left:
            continue  # larger ones of this tensor fit even less
        left -= extra
        chosen[name] = at
        if step := _step(name, hull, at):
            heappush(steps, step)
    return {name: hulls[name][at] for name, at in chosen.items()}


def _gain(small: Choice, large: Choice) -> float:
    """Cost saved per byte."""
    extra = large.n_bytes - small.n_bytes
    return (small.cost - large.cost) / extra if extra else inf


def _step(name: str, hull: Sequence[Choice], at: int) -> tuple[float, str, int] | None:
    """The next larger choice, ordered so that the best one comes first."""
    if at + 1 == len(hull):
        return None
    return -_gain(hull[at], hull[at + 1]), name, at + 1
