"""Which replica gets a request: the policies that `martlet simulate` compares.

Owns: the policies. Must not know: time, what a step costs, how requests end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from martlet.scripts import routing
from martlet.scripts.sim_replica import Asked, Replica

Route: TypeAlias = Callable[[Sequence[Replica], Asked], Replica]

FIRST_TOKENS = 64
"""By which prompts that nobody knows are told apart."""


def in_turn() -> Route:
    n = 0

    def route(replicas: Sequence[Replica], asked: Asked) -> Replica:
        nonlocal n
        n += 1
        return replicas[(n - 1) % len(replicas)]

    return route


def at_random() -> Route:
    draw = Random(0)
    return lambda replicas, asked: draw.choice(replicas)


def least_busy() -> Route:
    draw = Random(0)
    return lambda replicas, asked: _least(replicas, draw)


def by_prefix() -> Route:
    """As `martlet deploy ray` does it, with nothing unknown."""
    draw = Random(0)

    def route(replicas: Sequence[Replica], asked: Asked) -> Replica:
        chosen = routing.by_prefix(
            [each.n_unfinished for each in replicas],
            [each.n_known(asked) for each in replicas],
            [b"%d" % each.number for each in replicas],
            asked.tokens[: min(FIRST_TOKENS, asked.n_prompt)].tobytes(),
            draw,
        )
        return replicas[chosen]

    return route


def _least(replicas: Sequence[Replica], draw: Random) -> Replica:
    """Any of those with the fewest unfinished requests."""
    least = min(each.n_unfinished for each in replicas)
    return draw.choice([each for each in replicas if each.n_unfinished == least])


ROUTES: dict[str, Callable[[], Route]] = {
    "turn": in_turn,
    "random": at_random,
    "least": least_busy,
    "prefix": by_prefix,
}
