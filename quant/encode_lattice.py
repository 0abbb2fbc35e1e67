"""Recognises blocks that hold what a format can store exactly, but for the rounding of its floats.

Owns: the search for the half floats and integers that such a block was decoded from, whether or
not it was rounded to BF16 or F16 since, as checkpoints trained for a format are. Must not know:
bytes, files, which format it serves. Inlined into the kernels of `encode_legacy.py`.

A least-squares fit would come near the same values, but not back to them: the error of its search
and of the rounding to half floats would be lost each time a model is stored. Here every weight must
be what a level decodes to: as it is or, where all of the block are floats of 16 bits, rounded to
these. Weights that are on no lattice fail that after one or two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .encode_math import LARGEST, ONE, ZERO, F, half, helper, nearest, solve_offset

# Half a unit of the last place of F32, F16 and BF16, for a number of 1 … 2.
_PLACES = (2.0**-24, 2.0**-11, 2.0**-8)
_PRODUCT = 2.0**-19  # the same of a half float's 11 bits times the 8 of a level
_HIDDEN_BIT = 1 << 23
_NEAR = F(2.0**-11)  # half floats lie this far apart, relatively
_MOST_STEPS = 129
_SLACK = F(1e-4)  # levels; for the rounding of this search itself
_NOISE = F(2.0**-22)  # relatively, of float32 in intervals; what they yield is checked in float64
_UNSURE = F(0.49)  # levels; a weight that may be so far off says nothing about the step yet


@helper
def last_place(bits: Any, n: int) -> Any:
    """Half a unit of the last place that float32 with these bits, int32 (n,), use together, for
    numbers of 1 … 2."""
    used = _HIDDEN_BIT
    for i in range(n):
        used |= bits[i]
    return float(used & -used) * _PLACES[0]


@helper
def rounding(x: Any, place: Any) -> Any:
    """How far a number may be from x and still be rounded to it at this last place."""
    if x == ZERO:
        return ZERO
    _, exponent = math.frexp(x)
    return F(math.ldexp(place, exponent - 1))


@helper
def is_rounded(
    x: Any, n: int, step: Any, offset: Any, low: Any, top: Any, is_table: bool, place: Any
) -> bool:
    """Whether all x are what this step and offset decode to, rounded."""
    inv = ONE / step
    for i in range(n):
        q = nearest((x[i] - offset) * inv, low, top, is_table)
        exact = float(step) * float(q) + float(offset)
        if abs(float(x[i]) - exact) > rounding(x[i], place):
            return False
    return True


@helper
def step_from(
    x: Any, n: int, at: int, level: Any, low: Any, top: Any, is_table: bool, place: Any
) -> Any:
    """The half float whose multiples by levels all x are, x[at] being that by `level`; or 0.

    What a weight leaves open of the step is an interval; they are intersected.
    """
    a = x[at] / level
    r = rounding(x[at], place) / abs(level) + _NOISE * abs(a)
    least, most = a - r, a + r
    for _ in range(3):  # what a weight says of the step makes others sure of their levels
        for i in range(n):
            middle = (least + most) / F(2)
            q = nearest(x[i] / middle, low, top, is_table)
            if q == ZERO:
                if x[i] != ZERO:
                    return ZERO
                continue
            a = x[i] / q
            r = rounding(x[i], place) / abs(q) + _NOISE * abs(a)
            doubt = (r + (most - least) / F(2)) * q * q
            if not is_table and doubt > _UNSURE * abs(middle * q):  # a table's levels lie apart
                continue
            least, most = max(least, a - r), min(most, a + r)
            if least > most:
                return ZERO
    # If any half float is in there, so is the one nearest to the middle.
    step = half((least + most) / F(2))
    if step != ZERO and is_rounded(x, n, step, ZERO, low, top, is_table, place):
        return step
    return ZERO


@helper
def lattice_step(
    x: Any, bits: Any, n: int, fitted: Any, low: Any, top: Any, is_table: bool, fewest: int
) -> Any:
    """The step of the lattice without an offset that all x lie on; 0 where there is none.

    Tried is the level that the fitted step gives to the largest weight and, of whole numbers, those
    from `fewest` up.
    """
    at = 0
    for i in range(n):
        at = i if abs(x[i]) > abs(x[at]) else at
    if x[at] == ZERO or fitted == ZERO:
        return ZERO
    # Levels that are the same on both sides of 0 fit alike under both signs.
    signs = 1 if low + top == ZERO else 2
    last = last_place(bits, n)
    if last < _PRODUCT:
        return ZERO
    for place in _PLACES:
        if place > last:
            break
        level = nearest(x[at] / fitted, low, top, is_table)
        step = step_from(x, n, at, level, low, top, is_table, place) if level != ZERO else ZERO
        if step != ZERO:
            return step
        for k in range(0 if is_table else int(-low), fewest - 1, -1):
            for sign in range(signs):
                level = F(-k if (x[at] < ZERO) == (sign == 0) else k)
                if level <= top:
                    step = step_from(x, n, at, level, low, top, is_table, place)
                    if step != ZERO:
                        return step
    return ZERO


@helper
def lattice_with_offset(x: Any, bits: Any, n: int, top: Any) -> Any:
    """(step, offset) of the lattice of levels 0 … top that all x lie on; step 0 if there is none.

    k is how many levels lie between the lowest and the highest weight.
    """
    at_low, at_high = 0, 0
    for i in range(n):
        at_low = i if x[i] < x[at_low] else at_low
        at_high = i if x[i] > x[at_high] else at_high
    lowest, spread = x[at_low], x[at_high] - x[at_low]
    if not spread > ZERO:
        return ZERO, ZERO
    last = last_place(bits, n)
    for place in _PLACES:
        if place > last:
            break
        ends = rounding(lowest, place) + rounding(x[at_high], place)
        for k in range(int(top), 0, -1):
            inv = F(k) / spread
            is_found = True
            for i in range(n):
                v = (x[i] - lowest) * inv
                # No less than `rounding`, which takes longer.
                if abs(v - np.rint(v)) > (F(place) * abs(x[i]) + ends) * inv + _SLACK:
                    is_found = False
                    break
            if is_found:
                step, offset = _half_floats(
                    x, n, inv, lowest, k, top, place, F(2) * ends / F(k) + _NEAR * spread / F(k)
                )
                if step != ZERO:
                    return step, offset
    return ZERO, ZERO


@helper
def _half_floats(
    x: Any, n: int, inv: Any, lowest: Any, k: int, top: Any, place: Any, unsure: Any
) -> Any:
    """(step, offset) for x whose integers are (x - lowest)·inv, 0 … k, plus a number: all weights
    may leave out levels below. Step 0 where no half floats do.

    The step is known but for `unsure`: little where many levels are used, or weights near to 0.
    """
    sx, sq, sqq, sxq = ZERO, ZERO, ZERO, ZERO
    for i in range(n):
        q = np.rint((x[i] - lowest) * inv)
        sx += x[i]
        sq += q
        sqq += q * q
        sxq += x[i] * q
    _, fitted, _ = solve_offset(F(n), sx, sq, sqq, sxq, False)
    for j in range(_MOST_STEPS):
        away = F((j + 1) // 2) * _NEAR * fitted
        step = half(fitted + (away if j % 2 == 0 else -away))
        if step == ZERO or away > unsure:
            break
        least, most = -LARGEST, LARGEST
        for i in range(n):
            a = x[i] - step * np.rint((x[i] - lowest) * inv)
            r = rounding(x[i], place) + _NOISE * abs(x[i])
            least, most = max(least, a - r), min(most, a + r)
        for left_out in range(int(top) - k + 1):
            offset = half((least + most) / F(2) - F(left_out) * step)
            if is_rounded(x, n, step, offset, ZERO, top, False, place):
                return step, offset
    return ZERO, ZERO
