"""Guesses of what a request says next, for a step to check several tokens at once.

Owns: the Drafter interface, and prompt lookup: the request's own tokens are searched for what went
on after the same words before. Must not know: whether a guess pays, how it is checked.

A guess costs time when it is wrong and never a token: see speculation.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .pooling import Hidden
from .rejection import Distribution, Guess, certain
from .request import Request

LEAST_MATCH = 2
"""Tokens that must be the same; one says little."""
LONGER = (3, 5, 9, 17)
"""With so many that are the same a guess is of another kind: long copies go on."""
MOST_PLACES = 16
"""Earlier places that are looked at, the latest first."""


class Draft(NamedTuple):
    tokens: Sequence[int]
    kind: int = 0
    """Guesses of one kind are right about equally often: a place in Drafter.priors."""
    chances: Sequence[Distribution] = ()
    """What each token was drawn from; left out where nothing else could be guessed."""
    source: str = ""
    """Who has guessed; left out: the drafter, by its name."""

    def first(self, n: int) -> Draft:
        return self._replace(tokens=self.tokens[:n], chances=self.chances[:n])

    def guess(self, place: int) -> Guess:
        token = self.tokens[place]
        return Guess(token, self.chances[place] if self.chances else certain(token))


NO_DRAFT = Draft(())


class Drafter(Protocol):
    name: str
    priors: tuple[float, ...]
    """By kind of guess, how often its tokens are right before any was tried; hope costs little."""
    reach: int
    """Of a prompt it sees the hidden states of so many tokens before the end, and of all that
    follow; 0: of none."""

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        """For each request up to `most` tokens that may follow those it owns."""
        ...

    def token_seconds(self, n_requests: int) -> float:
        """What it takes to guess one token for each of so many requests; 0: next to nothing, and
        guesses are made before it is known how many of them pay."""
        ...

    def see(self, request: Request, first: int, hidden: Hidden) -> None:
        """Hidden states of the request's rows from `first` on, (n, dim) float32, as a step has
        computed them; tokens are drawn from it later. The last ones may be of wrong guesses."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...


class PromptLookup:
    """Drafts from a request's own prompt and output."""

    name = "lookup"
    priors: tuple[float, ...] = (0.4, 0.6, 0.8, 0.9, 0.95)
    reach = 0

    def __init__(self) -> None:
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        return [self._propose(request, most) for request in requests]

    def token_seconds(self, n_requests: int) -> float:
        return 0.0

    def see(self, request: Request, first: int, hidden: Hidden) -> None: ...

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _propose(self, request: Request, most: int) -> Draft:
        index = self._indexes.setdefault(request.id, _Index())
        place, n_same = index.longest_match(request.tokens)
        if not n_same:
            return NO_DRAFT
        return Draft(copied(request.tokens, place, most), bisect_right(LONGER, n_same))


class _Index:
    """Where every run of LEAST_MATCH tokens of a growing sequence has ended."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def longest_match(self, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The end of the earlier run that has most tokens in common with the end of `tokens`, and
        how many; of equal ones the latest. (0, 0) where there is none."""
        known, n_seen = self._tokens, len(self._tokens)
        known.extend(tokens[n_seen:].tolist())
        # The last run itself is no place to copy from: it is added once something follows it.
        for end in range(max(n_seen, LEAST_MATCH), len(known)):
            self._ends.setdefault(tuple(known[end - LEAST_MATCH : end]), []).append(end)
        best, n_best = 0, 0
        earlier = self._ends.get(tuple(known[-LEAST_MATCH:]), ())
        for end in reversed(earlier[-MOST_PLACES:]):
            n_same = _n_common(known, end)
            if n_same > n_best:
                best, n_best = end, n_same
        return best, n_best


def _n_common(tokens: list[int], place: int, most: int = 32) -> int:
    """Tokens that end before `place` and that the whole ends with, too. They are few, mostly:
    a loop is faster than arrays."""
    for n in range(min(place, most)):
        if tokens[place - 1 - n] != tokens[-1 - n]:
            return n
    return min(place, most)


def copied(tokens: npt.NDArray[np.int32], place: int, most: int) -> list[int]:
    """What follows `place`; where that reaches the end, what it would go on with if it repeated."""
    found: list[int] = tokens[place : place + most].tolist()
    period = len(tokens) - place
    while period and len(found) < most:
        found.append(found[-period])
    return found
