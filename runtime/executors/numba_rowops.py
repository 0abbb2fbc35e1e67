"""Kernels that take a row at a time: embed, norm, quantize, GLU.

Owns: what these ops do to a row. Must not know: plans or steps. A result that is wanted quantized
goes to the views of a Q8 buffer instead of `out`, which is then an empty matrix; what rounding
left over goes to `rest`, unless that is empty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from martlet.quant.kernel_cache import cached_kernel
from numba import njit, prange

from .numba_math import (
    Q8Views,
    exp,
    gelu_erf,
    helper,
    inverse_rms,
    load_upto,
    mean_of,
    quantize_planes,
    soft_cap,
    store_upto,
)
from .numba_vectors import (
    add,
    advance,
    div,
    fma,
    lane,
    load,
    maximum,
    minimum,
    mul,
    pointer,
    splat,
    sub,
)
from .numba_weights import BLOCK, LANES, FloatMatrix, QuantizedMatrix

FEW_ROWS = 4  # up to so many, waking other threads costs more than it saves
_kernel = cached_kernel(parallel=True, nogil=True)
_GELU_TANH, _SIGMOID, _IDENTITY, _CLAMPED, _GELU_ERF, _TANH, _RELU2 = 1, 2, 3, 4, 5, 6, 7


@njit(nogil=True)
def _quantize_rows(x: np.ndarray, q8: Q8Views, rest: Q8Views, start: int, stop: int) -> None:
    width = x.shape[1]
    scratch = np.empty(width, np.float32)
    for row in range(start, stop):
        source = advance(pointer(x), row * width)
        quantize_planes(source, pointer(scratch), q8, rest, row, width // BLOCK, 0, width // BLOCK)


@_kernel
def quantize_rows(x: np.ndarray, q8: Q8Views, rest: Q8Views, n_rows: int) -> None:
    if n_rows <= FEW_ROWS:
        _quantize_rows(x, q8, rest, 0, n_rows)
    else:
        for row in prange(n_rows):
            _quantize_rows(x, q8, rest, row, row + 1)


@njit(nogil=True)
def _norm_rows(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    group: int,
    centered: bool,
    eps: Any,
    out: np.ndarray,
    adds: bool,
    q8: Q8Views,
    rest: Q8Views,
    start: int,
    stop: int,
) -> None:
    width, n_weights, is_q8 = x.shape[1], weight.size, out.size == 0
    scratch, weights, biases = np.empty(width, np.float32), pointer(weight), pointer(bias)
    for row in range(start, stop):
        source = advance(pointer(x), row * width)
        to = pointer(scratch) if is_q8 else advance(pointer(out), row * width)
        for g in range(0, width, group):
            mean = mean_of(advance(source, g), group) if centered else np.float32(0)
            inverse = splat(inverse_rms(advance(source, g), group, eps, mean))
            for i in range(g, g + group, LANES):
                v = load_upto(source, i, g + group)
                if centered:
                    v = sub(v, splat(mean))
                v = mul(v, inverse)
                if n_weights > 0:
                    at = i if n_weights > group else i - g
                    v = mul(load_upto(weights, at, at + g + group - i), v)
                if bias.size > 0:
                    at = i if bias.size > group else i - g
                    v = add(load_upto(biases, at, at + g + group - i), v)
                if adds:
                    v = add(load_upto(to, i, g + group), v)
                store_upto(to, i, g + group, v)
        if is_q8:
            quantize_planes(to, to, q8, rest, row, width // BLOCK, 0, width // BLOCK)


@_kernel
def norm(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    group: int,
    centered: bool,
    eps: Any,
    out: np.ndarray,
    adds: bool,
    q8: Q8Views,
    rest: Q8Views,
    n_rows: int,
) -> None:
    """weight and bias are empty, as long as a group, or as long as a row."""
    if n_rows <= FEW_ROWS:
        _norm_rows(x, weight, bias, group, centered, eps, out, adds, q8, rest, 0, n_rows)
    else:
        for row in prange(n_rows):
            _norm_rows(x, weight, bias, group, centered, eps, out, adds, q8, rest, row, row + 1)


@helper
def scale_row(x: Any, n: int, scale: Any, cap: Any) -> None:
    """x = cap * tanh(scale * x / cap), cap 0: scale * x."""
    for i in range(0, n, LANES):
        v = mul(load_upto(x, i, n), splat(scale))
        if cap > np.float32(0):
            v = soft_cap(v, cap)
        store_upto(x, i, n, v)


@_kernel
def scale_rows(x: np.ndarray, scale: Any, cap: Any, n_rows: int) -> None:
    """In place on the first n_rows rows."""
    for row in prange(n_rows):
        scale_row(advance(pointer(x), row * x.shape[1]), x.shape[1], scale, cap)


@helper
def gated(gate: Any, up: Any, activation: int) -> Any:
    """silu(g) = g / (1 + exp(-g)); gelu's tanh form is g / (1 + exp(-2 t)) for its argument t."""
    if activation == _IDENTITY:
        return mul(gate, up)
    if activation == _GELU_ERF:
        return mul(gelu_erf(gate), up)
    if activation == _TANH:
        return mul(soft_cap(gate, np.float32(1)), up)
    if activation == _RELU2:  # a factor of gate itself keeps what is NaN
        half = mul(gate, maximum(gate, splat(np.float32(0))))
        return mul(half, up)
    one, z = splat(np.float32(1)), gate
    if activation == _CLAMPED:
        limit = splat(np.float32(7))
        gate = minimum(gate, limit)
        z = mul(gate, splat(np.float32(1.702)))
        up = add(maximum(minimum(up, limit), splat(np.float32(-7))), one)
    elif activation == _GELU_TANH:
        cubed = mul(mul(gate, gate), gate)
        z = fma(cubed, splat(np.float32(0.044715)), gate)
        z = mul(z, splat(np.float32(2 * math.sqrt(2 / math.pi))))
    share = one if activation == _SIGMOID else gate
    return mul(div(share, add(one, exp(sub(splat(np.float32(0)), z)))), up)


@njit(nogil=True)
def _glu_rows(
    x: np.ndarray,
    activation: int,
    alone: bool,
    out: np.ndarray,
    q8: Q8Views,
    rest: Q8Views,
    start: int,
    stop: int,
) -> None:
    width, is_q8 = x.shape[1] if alone else x.shape[1] // 2, out.size == 0
    scratch = np.empty(width, np.float32)
    for row in range(start, stop):
        gate = advance(pointer(x), row * x.shape[1])
        up = advance(gate, width)
        to = pointer(scratch) if is_q8 else advance(pointer(out), row * width)
        for i in range(0, width, LANES):
            by = splat(np.float32(1)) if alone else load_upto(up, i, width)
            v = gated(load_upto(gate, i, width), by, activation)
            store_upto(to, i, width, v)
        if is_q8:
            quantize_planes(to, to, q8, rest, row, width // BLOCK, 0, width // BLOCK)


@_kernel
def glu(
    x: np.ndarray,
    activation: int,
    alone: bool,
    out: np.ndarray,
    q8: Q8Views,
    rest: Q8Views,
    n_rows: int,
) -> None:
    if n_rows <= FEW_ROWS:
        _glu_rows(x, activation, alone, out, q8, rest, 0, n_rows)
    else:
        for row in prange(n_rows):
            _glu_rows(x, activation, alone, out, q8, rest, row, row + 1)


@_kernel
def add_gated(
    x: np.ndarray, by: np.ndarray, gate: np.ndarray, out: np.ndarray, n_rows: int
) -> None:
    """out += sigmoid(by . gate) * x"""
    for row in prange(n_rows):
        total = np.float32(0)
        for i in range(gate.size):
            total += by[row, i] * gate[i]
        share = np.float32(1 / (1 + math.exp(-total)))
        for i in range(x.shape[1]):
            out[row, i] += share * x[row, i]


@_kernel
def embed_quantized(
    w: QuantizedMatrix, tokens: np.ndarray, scale: Any, out: np.ndarray, adds: bool
) -> None:
    n_blocks, n_scales = w.n_cols // BLOCK, 1 + w.has_halves
    half = LANES * BLOCK // 2
    block_bytes = half if w.is_nibbles else 2 * half
    for row in prange(tokens.size):
        tile, at_lane = tokens[row] // LANES, tokens[row] % LANES
        for k in range(w.n_cols):
            block, within = tile * n_blocks + k // BLOCK, k % BLOCK
            at = within // 4 * 4 * LANES + at_lane * 4 + within % 4
            if w.is_nibbles:
                byte = np.int32(w.codes[block * block_bytes + at % half])
                code = byte & 15 if at < half else byte >> 4
            else:
                code = np.int32(w.codes[block * block_bytes + at])
            scale_at = (block * n_scales + within * n_scales // BLOCK) * LANES + at_lane
            value = w.scale[scale_at] * np.float32(code - w.bias)
            if w.offset.size > 0:
                value += w.offset[scale_at]
            before = out[row, k] if adds else np.float32(0)
            out[row, k] = before + scale * value


@_kernel
def embed_float(
    w: FloatMatrix, tokens: np.ndarray, scale: Any, out: np.ndarray, adds: bool
) -> None:
    for row in prange(tokens.size):
        tile, at_lane = tokens[row] // LANES, tokens[row] % LANES
        for k in range(w.n_cols):
            values = load(pointer(w.values), (tile * w.n_cols + k) * LANES)
            before = out[row, k] if adds else np.float32(0)
            out[row, k] = before + scale * lane(values, at_lane)
