"""Which of several replicas gets a request, by what each knows of its prompt: the rule that
`martlet deploy ray` follows and `martlet simulate` calculates with.

Owns: the rule. Must not know: requests, replicas, how their figures were found out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import ceil
from random import Random

MOST_BEHIND = 1.25
"""Times the mean of unfinished requests that a replica may have and still get those it knows
(bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016)."""


def by_prefix(
    unfinished: Sequence[int],
    known: Sequence[int],
    names: Sequence[bytes],
    beginning: bytes,
    draw: Random,
) -> int:
    """The place of the replica that knows most of the prompt, unless it is behind the others; a
    prompt that nobody knows goes by its beginning, so that those who begin alike meet.

    unfinished: requests that each replica has; known: how much of the prompt it has cached, in any
    unit; names: what stays the same of a replica while others come and go.
    """
    n = len(unfinished)
    most = ceil(MOST_BEHIND * (sum(unfinished) + 1) / n)  # so that somebody is below it
    free = [at for at in range(n) if unfinished[at] < most]
    best = max(known[at] for at in free)
    if not best:
        return max(free, key=lambda at: _rank(beginning, names[at]))
    knowing = [at for at in free if known[at] == best]
    least = min(unfinished[at] for at in knowing)
    return draw.choice([at for at in knowing if unfinished[at] == least])


def _rank(beginning: bytes, name: bytes) -> bytes:
    """Of a replica, for a beginning: highest random weight, as others come and go."""
    return hashlib.blake2b(beginning, key=name[-64:], digest_size=8).digest()
