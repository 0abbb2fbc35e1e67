"""Whether a guess that was drawn from one distribution is a draw from another.

Owns: distributions over tokens, the rule. Must not know: logits, requests, where guesses come from.

A guess x, drawn from q, stands with probability min(1, p(x) / q(x)); where it does not, a token is
drawn from max(0, p - q), scaled to sum to 1. What comes out is a draw from p: the first way gives
token x with probability min(p(x), q(x)), the second with what p(x) has beyond that, since p has as
much beyond q as q beyond p, which is how often a guess falls (Leviathan et al., 2023,
arXiv:2211.17192, appendix A.1; Chen et al., 2023, arXiv:2302.01318). A guess stands with
probability sum of min(p, q); were a draw from p to be the same token, with sum of p * q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .sampling import draw


@dataclass(frozen=True)
class Distribution:
    ids: npt.NDArray[np.intp] | None
    """(n) tokens in ascending order; None: the first n of the vocabulary."""
    weights: npt.NDArray[np.floating]
    """(n) chances up to a factor."""

    def chance(self, token: int) -> float:
        place = token if self.ids is None else int(np.searchsorted(self.ids, token))
        is_in = place < len(self.weights) and (self.ids is None or self.ids[place] == token)
        return float(self.weights[place]) / self._total if is_in else 0.0

    def draw(self, uniform: float) -> int:
        """uniform: in [0, 1)."""
        place = draw(self.weights, uniform)
        return place if self.ids is None else int(self.ids[place])

    def without(self, other: Distribution) -> Distribution:
        """max(0, p - q); p itself where they are the same but for rounding."""
        n = max(self._n, other._n)
        left = np.maximum(self._dense(n) - other._dense(n), 0.0)
        return Distribution(None, left) if left.any() else self

    @cached_property
    def _total(self) -> float:
        return float(self.weights.sum(dtype=np.float64))

    @property
    def _n(self) -> int:
        return len(self.weights) if self.ids is None else int(self.ids[-1]) + 1

    def _dense(self, n: int) -> npt.NDArray[np.float64]:
        chances = np.zeros(n)
        chances[slice(len(self.weights)) if self.ids is None else self.ids] = self.weights
        return chances / self._total


def certain(token: int) -> Distribution:
    return Distribution(np.array([token]), np.ones(1))


class Guess(NamedTuple):
    token: int
    chances: Distribution
    """What it was drawn from."""


def settle(guess: Guess, p: Distribution, coin: float, uniform: float) -> int:
    """A draw from p: the guess or another token. coin and uniform: two numbers in [0, 1) that the
    guess knows nothing of, nor one of the other."""
    if coin * guess.chances.chance(guess.token) < p.chance(guess.token):
        return guess.token
    return p.without(guess.chances).draw(uniform)
