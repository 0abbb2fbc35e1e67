"""Arithmetic that several numba kernels share: ragged rows, exp, RMS, quantization of a row.

Owns: the order in which a row's values are combined, which is the same in every kernel. Must not
know: ops, plans, threads. Pointers as in numba_vectors; every function is inlined.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .numba_vectors import (
    absolute,
    add,
    advance,
    div,
    fma,
    keep_lanes,
    load,
    load_first,
    max_lanes,
    maximum,
    minimum,
    mul,
    pointer,
    round_even,
    splat,
    store,
    store_first,
    store_int8,
    sub,
    sum_lanes,
    times_power_of_two,
)
from .numba_weights import BLOCK, LANES

# Where the parts of a quantized row start, in words per block; see ops.q8_row_bytes.
Q8_D, Q8_S, Q8_DS, Q8_H, Q8_DH = 8, 9, 10, 11, 13
_LARGEST = np.float32(np.finfo(np.float32).max)

helper = njit(nogil=True, forceinline=True)


class Q8Views(NamedTuple):
    """The bytes of a Q8 buffer, (max_rows, row_bytes), seen as three types."""

    codes: np.ndarray  # int8
    words: np.ndarray  # int32
    floats: np.ndarray  # float32


@helper
def load_upto(x: Any, at: int, end: int) -> Any:
    """16 values from `at`; those from `end` on are 0."""
    if at + LANES <= end:
        return load(x, at)
    return load_first(x, at, end - at)


@helper
def store_upto(out: Any, at: int, end: int, vector: Any) -> None:
    if at + LANES <= end:
        store(out, at, vector)
    else:
        store_first(out, at, end - at, vector)


@helper
def exp(x: Any) -> Any:
    """e ** x within 2 units in the last place; 0 and infinity beyond the float range."""
    x = maximum(minimum(x, splat(np.float32(150))), splat(np.float32(-150)))
    n = round_even(mul(x, splat(np.float32(1.4426950408889634))))
    # ln 2 in two parts, of which n times the first is exact.
    r = fma(n, splat(np.float32(-0.693145751953125)), x)
    r = fma(n, splat(np.float32(-1.4286068203094172e-06)), r)
    p = splat(np.float32(1 / 5040))
    p = fma(p, r, splat(np.float32(1 / 720)))
    p = fma(p, r, splat(np.float32(1 / 120)))
    p = fma(p, r, splat(np.float32(1 / 24)))
    p = fma(p, r, splat(np.float32(1 / 6)))
    p = fma(p, r, splat(np.float32(0.5)))
    p = fma(p, r, splat(np.float32(1)))
    p = fma(p, r, splat(np.float32(1)))
    return times_power_of_two(p, n)


@helper
def soft_cap(x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap); tanh(z) = (1 - e) / (1 + e) with e = exp(-2 z)."""
    one, e = splat(np.float32(1)), exp(mul(x, splat(np.float32(-2) / cap)))
    return mul(div(sub(one, e), add(one, e)), splat(cap))


@helper
def gelu_erf(x: Any) -> Any:
    """x times the share of a normal distribution below it, whose upper tail is within 1e-7 that of
    Abramowitz and Stegun, formula 7.1.26."""
    one, z, half = splat(np.float32(1)), absolute(x), splat(np.float32(0.5))
    t = div(one, fma(z, splat(np.float32(0.3275911 / math.sqrt(2))), one))
    p = splat(np.float32(1.061405429))
    p = fma(p, t, splat(np.float32(-1.453152027)))
    p = fma(p, t, splat(np.float32(1.421413741)))
    p = fma(p, t, splat(np.float32(-0.284496736)))
    p = fma(p, t, splat(np.float32(0.254829592)))
    tail = mul(mul(p, t), exp(mul(mul(z, z), splat(np.float32(-0.5)))))
    return sub(maximum(x, splat(np.float32(0))), mul(mul(z, half), tail))


@helper
def inverse_rms(x: Any, n: int, eps: Any, mean: Any) -> Any:
    """1 / sqrt(mean((x - mean) ** 2) + eps) of n values."""
    squares, centre = splat(np.float32(0)), splat(mean)
    for i in range(0, n, LANES):
        v = load_upto(x, i, n)
        if mean != np.float32(0):
            v = keep_lanes(sub(v, centre), 0, n - i, np.float32(0))
        squares = fma(v, v, squares)
    mean_square = sum_lanes(squares) / np.float32(n)
    return np.float32(1) / np.float32(math.sqrt(mean_square + eps))


@helper
def mean_of(x: Any, n: int) -> Any:
    total = splat(np.float32(0))
    for i in range(0, n, LANES):
        total = add(load_upto(x, i, n), total)
    return sum_lanes(total) / np.float32(n)


@helper
def _quantize(
    x: Any, codes: Any, words: Any, floats: Any, n_blocks: int, first: int, n: int
) -> None:
    """Quantizes n blocks of floats at x into blocks first … of a row of n_blocks."""
    for i in range(n):
        b = first + i
        low, high = load(x, i * BLOCK), load(x, i * BLOCK + LANES)
        largest = max_lanes(maximum(absolute(low), absolute(high)))
        d = largest / np.float32(127)
        inverse = np.float32(0)
        if largest > np.float32(0) and largest <= _LARGEST:
            inverse = np.float32(127) / largest
        if not inverse <= _LARGEST:  # so small that the block is zero for any purpose
            inverse, d = np.float32(0), np.float32(0)
        low = round_even(mul(low, splat(inverse)))
        high = round_even(mul(high, splat(inverse)))
        store_int8(codes, b * BLOCK, low)
        store_int8(codes, b * BLOCK + LANES, high)
        h0, h1 = np.float32(0), np.float32(0)
        if largest <= _LARGEST:  # else d alone carries the infinity or NaN
            h0, h1 = sum_lanes(low), sum_lanes(high)
        floats[Q8_D * n_blocks + b] = d
        words[Q8_S * n_blocks + b] = np.int32(h0 + h1)
        floats[Q8_DS * n_blocks + b] = d * (h0 + h1)
        words[Q8_H * n_blocks + 2 * b] = np.int32(h0)
        words[Q8_H * n_blocks + 2 * b + 1] = np.int32(h1)
        floats[Q8_DH * n_blocks + 2 * b] = d * h0
        floats[Q8_DH * n_blocks + 2 * b + 1] = d * h1


@helper
def _quantize_row(x: Any, q8: Q8Views, row: int, n_blocks: int, first: int, n: int) -> None:
    codes = advance(pointer(q8.codes), row * q8.codes.shape[1])
    words = advance(pointer(q8.words), row * q8.words.shape[1])
    floats = advance(pointer(q8.floats), row * q8.words.shape[1])
    _quantize(x, codes, words, floats, n_blocks, first, n)


@helper
def quantize_planes(
    x: Any, left: Any, q8: Q8Views, rest: Q8Views, row: int, n_blocks: int, first: int, n: int
) -> None:
    """n blocks of floats at x into blocks first … of a row of q8; what that leaves over into rest,
    if it is not empty. `left` has room for as many floats, and may be x."""
    _quantize_row(x, q8, row, n_blocks, first, n)
    if rest.codes.size > 0:
        codes = advance(pointer(q8.codes), row * q8.codes.shape[1] + first * BLOCK)
        d = advance(pointer(q8.floats), row * q8.floats.shape[1] + Q8_D * n_blocks + first)
        for i in range(n * BLOCK):
            left[i] = x[i] - np.float32(codes[i]) * d[i // BLOCK]
        _quantize_row(left, rest, row, n_blocks, first, n)
