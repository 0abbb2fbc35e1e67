"""The arithmetic of fitting a block: nearest levels, weighted sums, one- and two-parameter fits.

Owns: the search for a step (and an offset) of one run of weights that share them. Must not know:
formats' bytes, super-blocks, files. All of it is inlined into the kernels of `encode_*.py`, where
n, the levels and the search ranges are constants; that is what lets the loops become vectors.

Everywhere x are the weights, w how much their squared error counts, both float32 (n,). A weight
is stored as the level q nearest to (x - offset) / step; the error is Σ w (x - step·q - offset)².
For given integers the best step and offset solve a linear least-squares problem, so the search
goes over scales at which to round, and takes the solution for the integers that result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from .blocks_iq import IQ4_VALUES
from .kernel_cache import cached_kernel

# Sums may be reordered, which is what makes them vectors, and products may be fused; nothing
# is assumed of NaN, infinities or signed zeros. A process always sums in the same order.
FAST = {"reassoc", "contract", "nsz"}
# Only kernels call helpers: none needs an entry for Python or C, which take as long to compile.
helper = njit(  # type: ignore[call-overload]
    nogil=True, forceinline=True, fastmath=FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
kernel = cached_kernel(nogil=True, fastmath=FAST)

F = np.float32
ZERO, HALF, ONE = F(0), F(0.5), F(1)
TINY = F(1e-12)  # blocks whose weights all are smaller than this are stored as zeros
LARGEST_HALF = F(65504)
_SINGULAR = F(1e-5)
LARGEST = F(np.finfo(np.float32).max)

_IQ4_MIDDLES = ((IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2).astype(np.float32)
_IQ4_GAPS = np.diff(IQ4_VALUES).astype(np.float32)
_IQ4_LOWEST = IQ4_VALUES[0]
_N_GAPS = len(_IQ4_GAPS)


@helper
def half(value: Any) -> Any:
    """The half float nearest to value (ties to even), as float32; beyond the largest: that."""
    magnitude = abs(value)
    if magnitude >= LARGEST_HALF:
        return LARGEST_HALF if value > ZERO else -LARGEST_HALF
    _, exponent = math.frexp(magnitude)
    quantum = math.ldexp(1.0, max(exponent, -13) - 11)
    return F(np.rint(value / quantum) * quantum)


@helper
def inverse(step: Any) -> Any:
    """1 / step; 0 for a step of 0, which sends everything to level 0."""
    return ONE / step if step != ZERO else ZERO


@helper
def nearest(v: Any, low: Any, top: Any, is_table: bool) -> Any:
    """The level nearest to v: a whole number of low … top, or a value of the IQ4 table."""
    if is_table:
        level = _IQ4_LOWEST
        for k in range(_N_GAPS):
            level += _IQ4_GAPS[k] if v > _IQ4_MIDDLES[k] else ZERO
        return level
    v = v if v > low else low
    v = v if v < top else top
    return F(np.int32(v - low + HALF)) + low


@helper
def store_indices(
    q: Any, x: Any, n: int, step: Any, offset: Any, low: Any, top: Any, is_table: bool
) -> None:
    """q, uint8 (n,): the index of the nearest level, counted from the lowest."""
    inv = inverse(step)
    for i in range(n):
        v = (x[i] - offset) * inv
        if is_table:
            index = 0
            for k in range(_N_GAPS):
                index += 1 if v > _IQ4_MIDDLES[k] else 0
            q[i] = index
        else:
            q[i] = np.uint8(np.int32(nearest(v, low, top, False) - low))


@helper
def error_at(
    x: Any, w: Any, n: int, step: Any, offset: Any, low: Any, top: Any, is_table: bool
) -> Any:
    inv, total = inverse(step), ZERO
    for i in range(n):
        q = nearest((x[i] - offset) * inv, low, top, is_table)
        rest = x[i] - offset - step * q
        total += w[i] * rest * rest
    return total


@helper
def sums_at(
    x: Any, w: Any, n: int, inv: Any, offset: Any, low: Any, top: Any, is_table: bool
) -> Any:
    """(Σwq, Σwqq, Σwxq) for the levels nearest to (x - offset)·inv."""
    sq, sqq, sxq = ZERO, ZERO, ZERO
    for i in range(n):
        q = nearest((x[i] - offset) * inv, low, top, is_table)
        wq = w[i] * q
        sq += wq
        sqq += wq * q
        sxq += wq * x[i]
    return sq, sqq, sxq


@helper
def largest_magnitude(x: Any, n: int) -> Any:
    largest = ZERO
    for i in range(n):
        a = abs(x[i])
        largest = a if a > largest else largest
    return largest


@helper
def fit_step(
    x: Any, w: Any, n: int, low: Any, top: Any, is_table: bool, first: Any, stride: Any, tries: int
) -> Any:
    """The step, of either sign, with the least error; no offset.

    Tried are the scales that put the weight of largest magnitude at ±(first + k·stride) levels,
    k < tries; each with the best step for its integers. The error falls by (Σwxq)² / Σwqq.
    """
    largest = largest_magnitude(x, n)
    if largest < TINY:
        return ZERO
    # Levels that are the same on both sides of 0 round alike under both signs.
    signs = 1 if low + top == ZERO and not is_table else 2
    best, step = ZERO, ZERO
    for k in range(tries):
        scale = (first + F(k) * stride) / largest
        for sign in range(signs):
            inv = scale if sign == 0 else -scale
            _, sqq, sxq = sums_at(x, w, n, inv, ZERO, low, top, is_table)
            if sxq * sxq > best * sqq:
                best, step = sxq * sxq / sqq, sxq / sqq
    for _ in range(4):  # the better step may round some weights otherwise
        if step == ZERO:
            break
        _, sqq, sxq = sums_at(x, w, n, ONE / step, ZERO, low, top, is_table)
        if not sxq * sxq > best * sqq:
            break
        best, step = sxq * sxq / sqq, sxq / sqq
    return step


@helper
def solve_offset(sw: Any, sx: Any, sq: Any, sqq: Any, sxq: Any, is_low: bool) -> Any:
    """(fall of the error, step, offset) that are best for integers with these sums.

    is_low: the offset must not be above 0.
    """
    det = sw * sqq - sq * sq
    if not sqq > ZERO:
        return ZERO, ZERO, ZERO
    step, offset = sxq / sqq, ZERO  # all there is when the integers are alike
    if det > _SINGULAR * sw * sqq:
        offset = (sqq * sx - sq * sxq) / det
        if is_low and offset > ZERO:
            offset = ZERO
        else:
            step = (sw * sxq - sx * sq) / det
    fall = step * (F(2) * (sxq - offset * sq) - step * sqq) + offset * (F(2) * sx - offset * sw)
    return fall, step, offset


@helper
def fit_offset(
    x: Any,
    w: Any,
    n: int,
    top: Any,
    is_low: bool,
    first: Any,
    stride: Any,
    tries: int,
    shift: Any,
    shifts: int,
) -> Any:
    """(step, offset) with the least error found; levels are 0 … top, the step is not negative.

    Tried are scales that spread the range of x over first + k·stride levels, k < tries, with its
    lowest weight at level 0 and up to ±shifts·shift levels from it. is_low: offset ≤ 0.
    """  # fmt: skip
    lowest, highest, sw, sx = x[0], x[0], ZERO, ZERO
    for i in range(n):
        lowest = x[i] if x[i] < lowest else lowest
        highest = x[i] if x[i] > highest else highest
        sw += w[i]
        sx += w[i] * x[i]
    if is_low and lowest > ZERO:
        lowest = ZERO
    if highest - lowest < TINY:
        return ZERO, sx / sw if not (is_low and sx > ZERO) else ZERO
    best, best_step, best_offset = -LARGEST, ZERO, ZERO
    for k in range(tries):
        inv = (first + F(k) * stride) / (highest - lowest)
        for j in range(-shifts, shifts + 1):
            at = lowest + F(j) * shift / inv
            sq, sqq, sxq = sums_at(x, w, n, inv, at, ZERO, top, False)
            fall, step, offset = solve_offset(sw, sx, sq, sqq, sxq, is_low)
            if fall > best and step > ZERO:
                best, best_step, best_offset = fall, step, offset
    for _ in range(4):
        if best_step == ZERO:
            break
        sq, sqq, sxq = sums_at(x, w, n, ONE / best_step, best_offset, ZERO, top, False)
        fall, step, offset = solve_offset(sw, sx, sq, sqq, sxq, is_low)
        if not (fall > best and step > ZERO):
            break
        best, best_step, best_offset = fall, step, offset
    return best_step, best_offset
