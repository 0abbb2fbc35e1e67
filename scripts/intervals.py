"""How sure a ratio of repeated measurements is: Student's intervals of logarithms.
Owns the statistics; must not know what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

N_SLICES = 2000  # of Simpson's rule, even
LEAST_DEVIATION = 1e-9  # of logarithms: equal samples leave no doubt, and no division by zero


@dataclass(frozen=True)
class Ratio:
    """first ÷ second, and where it lies with the confidence asked for."""

    value: float
    low: float
    high: float
    is_paired: bool

    @property
    def is_tie(self) -> bool:
        return self.low <= 1 <= self.high


def ratio(
    first: Sequence[float], second: Sequence[float], *, is_paired: bool, confidence: float
) -> Ratio:
    """Of positive samples, two or more each. Their logarithms are taken for normal: what disturbs
    a measurement multiplies. Paired: repeat by repeat, so that what disturbs both cancels out;
    else Welch's interval, which lets the two scatter differently."""
    a, b = [math.log(each) for each in first], [math.log(each) for each in second]
    if is_paired:
        differences = [x - y for x, y in zip(a, b, strict=True)]
        middle, n = statistics.fmean(differences), len(differences)
        error, freedom = statistics.stdev(differences) / math.sqrt(n), n - 1.0
    else:
        middle = statistics.fmean(a) - statistics.fmean(b)
        parts = [statistics.variance(each) / len(each) for each in (a, b)]
        error, freedom = math.sqrt(sum(parts)), welch_freedom(parts, (len(a), len(b)))
    half = student(confidence, freedom) * max(error, LEAST_DEVIATION)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), is_paired)


def welch_freedom(parts: Sequence[float], counts: Sequence[int]) -> float:
    """Welch and Satterthwaite's; parts: variance ÷ n of each side."""
    below = sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    return sum(parts) ** 2 / below if below else float(sum(counts) - 2)


def student(confidence: float, freedom: float) -> float:
    """t with `confidence` of Student's distribution between -t and t, by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return high


def within(t: float, freedom: float) -> float:
    """The distribution's mass between -t and t: with x = sqrt(freedom) tan(angle), the density
    becomes a power of the cosine, which Simpson's rule takes smoothly."""
    end = math.atan(t / math.sqrt(freedom))
    step = end / N_SLICES
    values = [math.cos(step * i) ** (freedom - 1) for i in range(N_SLICES + 1)]
    area = step / 3 * (values[0] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]) + values[-1])
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return 2 * area * math.exp(scale) / math.sqrt(math.pi)
