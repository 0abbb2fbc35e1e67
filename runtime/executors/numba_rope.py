"""Kernels of heads: the rope table, and rope with the norms of heads and the KV write.

Owns: how queries, keys and values of a row are turned, and where they go in the pools. Must not
know: attention, plans or steps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from martlet.quant.kernel_cache import cached_kernel
from numba import njit, prange

from .numba_math import helper, inverse_rms, load_upto, store_upto
from .numba_rowops import FEW_ROWS, scale_row
from .numba_vectors import advance, mul, pointer, splat, store_rounded
from .numba_weights import LANES

_kernel = cached_kernel(parallel=True, nogil=True)


@_kernel
def rope_table(positions: np.ndarray, inv_freq: np.ndarray, factor: float, out: np.ndarray) -> None:
    """out[2i], out[2i+1] = factor * cos, sin of position * inv_freq[i], all in float64."""
    for row in prange(positions.size):
        for i in range(inv_freq.size):
            angle = np.float64(positions[row]) * inv_freq[i]
            out[row, 2 * i] = np.float32(math.cos(angle) * factor)
            out[row, 2 * i + 1] = np.float32(math.sin(angle) * factor)


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
            scale_row(x, n_q, np.float32(1.0 + order.temperature * grown), np.float32(0))
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
    if n_rows <= FEW_ROWS:
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
