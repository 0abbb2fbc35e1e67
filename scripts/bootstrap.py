"""Error bars by bootstrap over chunks of text, of one figure and of paired differences.
Owns the resampling; must not know what the figures mean.

Chunks are drawn with replacement, whole, so that tokens of one chunk may depend on each other.
Efron and Tibshirani, An Introduction to the Bootstrap, 1993: §6 (errors), §13 (intervals)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

N_RESAMPLES = 4000
SEED = 0
LEVEL = 0.95


def resampled(chunk_means: np.ndarray) -> np.ndarray:
    """Means of N_RESAMPLES drawings of the chunks: (n_chunks, …) to (N_RESAMPLES, …).

    Drawings spread by √((n - 1) / n) too little; deviations from the mean are widened by it."""
    n = len(chunk_means)
    rng = np.random.default_rng(SEED)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES)
    means = np.tensordot(counts / n, chunk_means, axes=1)
    centre = chunk_means.mean(axis=0)
    return np.asarray(centre + (means - centre) * math.sqrt(n / max(n - 1, 1)))


def standard_errors(
    chunk_means: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Of what `measure` makes of means (…, k); NaN where there is one chunk."""
    errors = measure(resampled(chunk_means)).std(axis=0)
    return np.asarray(errors if len(chunk_means) > 1 else np.full_like(errors, math.nan))


@dataclass(frozen=True)
class Difference:
    """Of two figures over the same chunks: value, one standard error, and a 95 % interval."""

    value: float
    error: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def paired(chunk_means: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]) -> Difference:
    """`measure` makes one figure of means (…, k), in which both sides are columns."""
    value = float(measure(chunk_means.mean(axis=0)))
    if len(chunk_means) < 2:
        return Difference(value, math.nan, -math.inf, math.inf)
    drawn = measure(resampled(chunk_means))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(value, float(drawn.std()), float(low), float(high))
