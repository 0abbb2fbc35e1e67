"""Matrix products of the numba executor: out[:, col:] (+)= x @ w.T + b, for blocks and for floats.

Owns: the kernels over packed weights (numba_weights) and quantized rows (ops.q8_row_bytes). Must
not know: plans, steps or block formats. Lanes are weight rows. Every (row, token) is summed over
its blocks in ascending order by one thread, and the four-token kernel repeats the one-token
kernel's arithmetic exactly, so a result does not depend on how many tokens came along.

Of a quantized row the kernels read words (int32: four codes, or a sum) and floats (float32), which
are views of the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from martlet.quant.kernel_cache import cached_kernel
from numba import njit, prange

from .numba_dot4 import dot4
from .numba_math import Q8_D, Q8_DH, Q8_DS, Q8_H, Q8Views, helper
from .numba_vectors import (
    add,
    add_i,
    advance,
    fma,
    high_nibbles,
    load,
    load_bytes,
    load_first,
    low_nibbles,
    mul,
    pointer,
    splat,
    splat_i,
    store_first,
    to_float,
)
from .numba_weights import BLOCK, LANES, FloatMatrix, QuantizedMatrix

_GROUPS = BLOCK // 4  # four-byte groups of a block
_HALF = _GROUPS // 2
_VECTOR_BYTES = 4 * LANES
_BATCH = 4  # tokens that share one load of weights


@helper
def _groups(codes: Any, is_nibbles: bool, b: int, g: int) -> Any:
    """Group g of the first half of block b and of its second, for 16 rows."""
    if is_nibbles:
        both = load_bytes(codes, (b * _HALF + g) * _VECTOR_BYTES)
        return low_nibbles(both), high_nibbles(both)
    at = (b * _GROUPS + g) * _VECTOR_BYTES
    return load_bytes(codes, at), load_bytes(codes, at + _HALF * _VECTOR_BYTES)


@helper
def _start(bias: Any, words: Any, n_blocks: int, b: int) -> Any:
    """Integer accumulators of the halves: minus bias times the sum of their activations."""
    at = Q8_H * n_blocks + 2 * b
    return splat_i(-bias * words[at]), splat_i(-bias * words[at + 1])


@helper
def _fold(
    acc: Any,
    first: Any,
    second: Any,
    scale: Any,
    offset: Any,
    has_offset: bool,
    has_halves: bool,
    floats: Any,
    n_blocks: int,
    b: int,
) -> Any:
    """Adds the integer sums and the offsets of block b to the result, scaled."""
    d = splat(floats[Q8_D * n_blocks + b])
    if has_halves:
        at, sums = 2 * b * LANES, Q8_DH * n_blocks + 2 * b
        acc = fma(to_float(first), mul(load(scale, at), d), acc)
        acc = fma(to_float(second), mul(load(scale, at + LANES), d), acc)
        if has_offset:
            acc = fma(load(offset, at), splat(floats[sums]), acc)
            acc = fma(load(offset, at + LANES), splat(floats[sums + 1]), acc)
        return acc
    at = b * LANES
    acc = fma(to_float(add_i(first, second)), mul(load(scale, at), d), acc)
    if has_offset:
        acc = fma(load(offset, at), splat(floats[Q8_DS * n_blocks + b]), acc)
    return acc


@helper
def _dot_1(
    codes: Any,
    scale: Any,
    offset: Any,
    bias: Any,
    is_nibbles: bool,
    has_offset: bool,
    has_halves: bool,
    words: Any,
    floats: Any,
    n_blocks: int,
) -> Any:
    """A tile's 16 products with one token."""
    acc = splat(np.float32(0))
    for b in range(n_blocks):
        s, t = _start(bias, words, n_blocks, b)
        for g in range(_HALF):
            low, high = _groups(codes, is_nibbles, b, g)
            at = b * _GROUPS + g
            s, t = dot4(s, low, words[at]), dot4(t, high, words[at + _HALF])
        acc = _fold(acc, s, t, scale, offset, has_offset, has_halves, floats, n_blocks, b)
    return acc


@helper
def _dot_4(
    codes: Any,
    scale: Any,
    offset: Any,
    bias: Any,
    is_nibbles: bool,
    has_offset: bool,
    has_halves: bool,
    x0: Any,
    f0: Any,
    row_words: int,
    n_blocks: int,
) -> Any:
    """A tile's 16 products with each of four tokens, whose rows start row_words apart."""
    x1, f1 = advance(x0, row_words), advance(f0, row_words)
    x2, f2 = advance(x1, row_words), advance(f1, row_words)
    x3, f3 = advance(x2, row_words), advance(f2, row_words)
    acc0 = splat(np.float32(0))
    acc1, acc2, acc3 = acc0, acc0, acc0
    for b in range(n_blocks):
        s0, t0 = _start(bias, x0, n_blocks, b)
        s1, t1 = _start(bias, x1, n_blocks, b)
        s2, t2 = _start(bias, x2, n_blocks, b)
        s3, t3 = _start(bias, x3, n_blocks, b)
        for g in range(_HALF):
            low, high = _groups(codes, is_nibbles, b, g)
            at = b * _GROUPS + g
            s0, t0 = dot4(s0, low, x0[at]), dot4(t0, high, x0[at + _HALF])
            s1, t1 = dot4(s1, low, x1[at]), dot4(t1, high, x1[at + _HALF])
            s2, t2 = dot4(s2, low, x2[at]), dot4(t2, high, x2[at + _HALF])
            s3, t3 = dot4(s3, low, x3[at]), dot4(t3, high, x3[at + _HALF])
        acc0 = _fold(acc0, s0, t0, scale, offset, has_offset, has_halves, f0, n_blocks, b)
        acc1 = _fold(acc1, s1, t1, scale, offset, has_offset, has_halves, f1, n_blocks, b)
        acc2 = _fold(acc2, s2, t2, scale, offset, has_offset, has_halves, f2, n_blocks, b)
        acc3 = _fold(acc3, s3, t3, scale, offset, has_offset, has_halves, f3, n_blocks, b)
    return acc0, acc1, acc2, acc3


@helper
def _emit(acc: Any, bias: Any, has_bias: bool, out: Any, n: int, adds: bool) -> None:
    """Writes the first n of a tile's results at out, or adds them to what is there."""
    if has_bias:
        acc = add(acc, load_first(bias, 0, n))
    if adds:
        acc = add(load_first(out, 0, n), acc)
    store_first(out, 0, n, acc)


@njit(nogil=True)
def _quantized_tile(
    w: QuantizedMatrix,
    tile: int,
    bias: np.ndarray,
    words: np.ndarray,
    floats: np.ndarray,
    n_tokens: int,
    out: np.ndarray,
    col: int,
    adds: bool,
) -> None:
    """The products of 16 weight rows with all tokens; the tile stays in the nearest cache."""
    n_blocks, first = w.n_cols // BLOCK, tile * LANES
    n, n_scales = min(LANES, w.n_rows - first), LANES * (1 + w.has_halves)
    block_bytes = _GROUPS * _VECTOR_BYTES // (1 + w.is_nibbles)
    codes = advance(pointer(w.codes), tile * n_blocks * block_bytes)
    scale = advance(pointer(w.scale), tile * n_blocks * n_scales)
    offset = advance(pointer(w.offset), tile * n_blocks * n_scales)
    code_bias, is_nibbles, has_halves = np.int32(w.bias), w.is_nibbles, w.has_halves
    has_offset, has_bias, bias_at = w.offset.size > 0, bias.size > 0, advance(pointer(bias), first)
    x, f, row_words = pointer(words), pointer(floats), words.shape[1]
    out_at, out_width = advance(pointer(out), col + first), out.shape[1]
    for _ in range(n_tokens // _BATCH):
        acc0, acc1, acc2, acc3 = _dot_4(
            codes, scale, offset, code_bias, is_nibbles, has_offset, has_halves, x, f, row_words,
            n_blocks,
        )  # fmt: skip
        _emit(acc0, bias_at, has_bias, out_at, n, adds)
        _emit(acc1, bias_at, has_bias, advance(out_at, out_width), n, adds)
        _emit(acc2, bias_at, has_bias, advance(out_at, 2 * out_width), n, adds)
        _emit(acc3, bias_at, has_bias, advance(out_at, 3 * out_width), n, adds)
        x, f = advance(x, _BATCH * row_words), advance(f, _BATCH * row_words)
        out_at = advance(out_at, _BATCH * out_width)
    for _ in range(n_tokens % _BATCH):
        acc = _dot_1(
            codes, scale, offset, code_bias, is_nibbles, has_offset, has_halves, x, f, n_blocks
        )
        _emit(acc, bias_at, has_bias, out_at, n, adds)
        x, f, out_at = advance(x, row_words), advance(f, row_words), advance(out_at, out_width)


@cached_kernel(parallel=True, nogil=True)
def linear_quantized(
    w: QuantizedMatrix,
    bias: np.ndarray,
    x: Q8Views,
    rest: Q8Views,
    n_tokens: int,
    out: np.ndarray,
    col: int,
    adds: bool,
) -> None:
    """out (max_rows, width) float32; bias is empty or one float32 per weight row.

    What `rest` holds, if it is not empty, is added to x: its products to the products of x.
    """
    no_bias, has_rest = bias[:0], rest.codes.size > 0
    for tile in prange((w.n_rows + LANES - 1) // LANES):
        _quantized_tile(w, tile, bias, x.words, x.floats, n_tokens, out, col, adds)
        if has_rest:
            _quantized_tile(w, tile, no_bias, rest.words, rest.floats, n_tokens, out, col, True)


@njit(nogil=True)
def _float_tile(
    w: FloatMatrix,
    tile: int,
    bias: np.ndarray,
    x: np.ndarray,
    n_tokens: int,
    out: np.ndarray,
    col: int,
    adds: bool,
) -> None:
    n_cols, first = w.n_cols, tile * LANES
    n, has_bias, bias_at = min(LANES, w.n_rows - first), bias.size > 0, pointer(bias)
    values, bias_at = advance(pointer(w.values), tile * n_cols * LANES), advance(bias_at, first)
    x0, out_at, out_width = pointer(x), advance(pointer(out), col + first), out.shape[1]
    for _ in range(n_tokens // _BATCH):
        x1, x2, x3 = advance(x0, n_cols), advance(x0, 2 * n_cols), advance(x0, 3 * n_cols)
        acc0 = splat(np.float32(0))
        acc1, acc2, acc3 = acc0, acc0, acc0
        for k in range(n_cols):
            weights = load(values, k * LANES)
            acc0 = fma(weights, splat(x0[k]), acc0)
            acc1 = fma(weights, splat(x1[k]), acc1)
            acc2 = fma(weights, splat(x2[k]), acc2)
            acc3 = fma(weights, splat(x3[k]), acc3)
        _emit(acc0, bias_at, has_bias, out_at, n, adds)
        _emit(acc1, bias_at, has_bias, advance(out_at, out_width), n, adds)
        _emit(acc2, bias_at, has_bias, advance(out_at, 2 * out_width), n, adds)
        _emit(acc3, bias_at, has_bias, advance(out_at, 3 * out_width), n, adds)
        x0, out_at = advance(x0, _BATCH * n_cols), advance(out_at, _BATCH * out_width)
    for _ in range(n_tokens % _BATCH):
        acc = splat(np.float32(0))
        for k in range(n_cols):
            acc = fma(load(values, k * LANES), splat(x0[k]), acc)
        _emit(acc, bias_at, has_bias, out_at, n, adds)
        x0, out_at = advance(x0, n_cols), advance(out_at, out_width)


@cached_kernel(parallel=True, nogil=True)
def linear_float(
    w: FloatMatrix,
    bias: np.ndarray,
    x: np.ndarray,
    n_tokens: int,
    out: np.ndarray,
    col: int,
    adds: bool,
) -> None:
    """As linear_quantized, for float32 rows x (max_rows, n_cols) and plain float weights."""
    for tile in prange((w.n_rows + LANES - 1) // LANES):
        _float_tile(w, tile, bias, x, n_tokens, out, col, adds)
