"""Which replica gets a request: the policies that `martlet simulate` compares.

Owns: the policies. Must not know: time, what a step costs, how requests end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import TypeAlias

from martlet.scripts.sim_replica import Asked, Replica

Route: TypeAlias = Callable[[Sequence[Replica], Asked], Replica]

MOST_BEHIND = 1.25
"""Times the mean of unfinished requests that a replica may have and still get those it knows
(bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016)."""
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
    """To the replica that knows most of the prompt, unless it is behind the others; a prompt that
    nobody knows goes by its beginning, so that those who begin alike meet."""

    draw = Random(0)

    def route(replicas: Sequence[Replica], asked: Asked) -> Replica:
        n_all = sum(each.n_unfinished for each in replicas) + 1
        most = ceil(MOST_BEHIND * n_all / len(replicas))  # so that somebody is below it
        free = [each for each in replicas if each.n_unfinished < most]
        known = {each.number: each.n_known(asked) for each in free}
        best = max(known.values())
        if best:
            return _least([each for each in free if known[each.number] == best], draw)
        beginning = asked.tokens[: min(FIRST_TOKENS, asked.n_prompt)].tobytes()
        return max(free, key=lambda each: _rank(beginning, each.number))

    return route


def _least(replicas: Sequence[Replica], draw: Random) -> Replica:
    """Any of those with the fewest unfinished requests."""
    least = min(each.n_unfinished for each in replicas)
    return draw.choice([each for each in replicas if each.n_unfinished == least])


def _rank(beginning: bytes, number: int) -> bytes:
    """Of a replica, for a beginning: highest random weight, as others come and go."""
    return hashlib.blake2b(beginning, key=b"%d" % number, digest_size=8).digest()


ROUTES: dict[str, Callable[[], Route]] = {
    "turn": in_turn,
    "random": at_random,
    "least": least_busy,
    "prefix": by_prefix,
}
