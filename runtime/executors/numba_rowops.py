"""Kernels that take a row at a time: embed, norm, quantize, rope table, rope + KV write, GLU.

Owns: what these ops do to a row. Must not know: plans or steps. A result that is wanted quantized
goes to the views of a Q8 buffer instead of `out`, which is then an empty matrix; what rounding
left over goes to `rest`, unless that is empty.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    store_rounded,
    sub,
)
from .numba_weights import BLOCK, LANES, FloatMatrix, QuantizedMatrix

_FEW_ROWS = 4  # up to so many, waking other threads costs more than it saves
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
    if n_rows <= _FEW_ROWS:
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
    if n_rows <= _FEW_ROWS:
        _norm_rows(x, weight, bias, group, centered, eps, out, adds, q8, rest, 0, n_rows)
    else:
        for row in prange(n_rows):
            _norm_rows(x, weight, bias, group, centered, eps, out, adds, q8, rest, row, row + 1)


@helper
def _scale_row(x: Any, n: int, scale: Any, cap: Any) -> None:
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
        _scale_row(advance(pointer(x), row * x.shape[1]), x.shape[1], scale, cap)


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
    if n_rows <= _FEW_ROWS:
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
def rope_table(positions: np.ndarray, inv_freq: np.ndarray, factor: float, out: np.ndarray) -> None:
    """out[2i], out[2i+1] = factor * cos, sin of position * inv_freq[i], all in float64."""
    for row in prange(positions.size):
        for i in range(inv_freq.size):
            angle = np.float64(positions[row]) * inv_freq[i]
            out[row, 2 * i] = np.float32(math.cos(angle) * factor)
            out[row, 2 * i + 1] = np.float32(math.sin(angle) * factor)


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


class HeadShape(NamedTuple):
    """Sizes that rope and attention share."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_latent: bool  # values are the first value_dim values of a key, kept once


class HeadOrder(NamedTuple):
    """What else rope_kv does to heads, besides turning them."""

    norm_after: bool  # norms come after rope, not before
    temperature: float  # q *= 1 + temperature * ln(1 + position // span)
    span: int  # 0: no such factor
    v_norm: bool  # values are normed, without a weight


@helper
def _norm_part(x: Any, n: int, weight: np.ndarray, eps: Any) -> None:
    """Over as many of the n values as the weight has at a time; none where it is empty."""
    weights, group = pointer(weight), weight.size
    for g in range(0, n if group > 0 else 0, max(group, 1)):
        head = advance(x, g)
        inverse = splat(inverse_rms(head, group, eps, np.float32(0)))
        for i in range(0, group, LANES):
            v = mul(load_upto(head, i, group), inverse)
            store_upto(head, i, group, mul(load_upto(weights, i, group), v))


@helper
def _norm_keys(k: Any, shape: HeadShape, weight: np.ndarray, eps: Any) -> None:
    """Of latent keys the values alone."""
    if shape.is_latent:
        for h in range(shape.kv_heads):
            _norm_part(advance(k, h * shape.head_dim), shape.value_dim, weight, eps)
    else:
        _norm_part(k, shape.kv_heads * shape.head_dim, weight, eps)


@helper
def _rotate_head(x: Any, trig: Any, n_rot: int, is_half: bool) -> None:
    apart, stride = (n_rot // 2, 1) if is_half else (1, 2)
    for i in range(n_rot // 2):
        cos, sin = trig[2 * i], trig[2 * i + 1]
        a, b = x[i * stride], x[i * stride + apart]
        x[i * stride] = a * cos - b * sin
        x[i * stride + apart] = a * sin + b * cos


@njit(nogil=True)
def _rope_kv_rows(
    qkv: np.ndarray,
    trig: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: Any,
    shape: HeadShape,
    n_rot: int,
    is_half: bool,
    order: HeadOrder,
    positions: np.ndarray,
    slots: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_tokens: int,
    start: int,
    stop: int,
) -> None:
    heads, kv_heads, head_dim, value_dim, is_latent = shape
    n_q, n_k = heads * head_dim, kv_heads * head_dim
    turns_from = value_dim if is_latent else 0
    padded_dim = (value_dim + LANES - 1) // LANES * LANES
    k_pool, v_pool = pointer(keys), pointer(values)
    writes = qkv.shape[1] > n_q  # else another layer's are read
    for row in range(start, stop):
        x = advance(pointer(qkv), row * qkv.shape[1])
        k, v = advance(x, n_q), advance(x, n_q + n_k)
        angles = advance(pointer(trig), row * trig.shape[1])
        if not order.norm_after:
            _norm_part(x, n_q, q_norm, eps)
            _norm_keys(k, shape, k_norm, eps)
        for h in range(heads + kv_heads if writes else heads):
            _rotate_head(advance(x, h * head_dim + turns_from), angles, n_rot, is_half)
        if order.norm_after:
            _norm_part(x, n_q, q_norm, eps)
            _norm_keys(k, shape, k_norm, eps)
        if order.span > 0:
            grown = math.log(1.0 + np.float64(positions[row] // order.span))
            _scale_row(x, n_q, np.float32(1.0 + order.temperature * grown), np.float32(0))
        if order.v_norm and writes:
            for h in range(kv_heads):
                head = advance(v, h * value_dim)
                inverse = splat(inverse_rms(head, value_dim, eps, np.float32(0)))
                for i in range(0, value_dim, LANES):
                    store_upto(head, i, value_dim, mul(load_upto(head, i, value_dim), inverse))
        block, t = slots[row] // block_tokens, slots[row] % block_tokens
        for h in range(kv_heads if writes else 0):
            first = (block * kv_heads + h) * block_tokens
            at = (first + t // LANES * LANES) * head_dim + t % LANES
            for i in range(head_dim):
                store_rounded(k_pool, at + i * LANES, k[h * head_dim + i])
            at = (first + t) * padded_dim
            for i in range(0 if is_latent else value_dim):
                store_rounded(v_pool, at + i, v[h * value_dim + i])


@_kernel
def rope_kv(
    qkv: np.ndarray,
    trig: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: Any,
    shape: HeadShape,
    n_rot: int,
    is_half: bool,
    order: HeadOrder,
    positions: np.ndarray,
    slots: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_tokens: int,
) -> None:
    """In place on qkv (max_rows, [q | k | v]), then k and v to their slots of the pools.

    keys    [block][kv head][16 tokens][head_dim][16], values [block][kv head][token][value_dim
    padded to 16], none of latent layers; both flat, float32 or the bits of float16
    """
    n_rows = slots.size
    if n_rows <= _FEW_ROWS:
        _rope_kv_rows(
            qkv, trig, q_norm, k_norm, eps, shape, n_rot, is_half, order, positions, slots, keys,
            values, block_tokens, 0, n_rows,
        )  # fmt: skip
    else:
        for row in prange(n_rows):
            _rope_kv_rows(
                qkv, trig, q_norm, k_norm, eps, shape, n_rot, is_half, order, positions, slots,
                keys, values, block_tokens, row, row + 1,
            )  # fmt: skip
