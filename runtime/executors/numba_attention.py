"""Causal attention of the numba executor over the paged KV pool.

Owns: the order in which a row meets its keys and values: 16 positions at a time at absolute
places, two passes (scores and their maximum, then weights and values). So a row's result depends
on its own prefix only, never on the other rows of the step or on threads. Must not know: plans,
weights. The pool's layout is that of rope_kv in numba_rowops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from martlet.quant.kernel_cache import cached_kernel
from numba import njit, prange

from .numba_math import Q8Views, exp, helper, quantize_planes, soft_cap, store_upto
from .numba_rope import HeadShape
from .numba_vectors import (
    add,
    advance,
    fma,
    keep_lanes,
    load,
    max_lanes,
    maximum,
    mul,
    pointer,
    splat,
    store,
    sub,
    sum_lanes,
)
from .numba_weights import BLOCK, LANES

_MINUS_INFINITY = np.float32(-np.inf)


@helper
def _dot_keys(q: Any, keys: Any, head_dim: int) -> Any:
    """q times each of 16 keys; even and odd dims apart, for two chains of additions."""
    even = splat(np.float32(0))
    odd = even
    for i in range(0, head_dim - 1, 2):
        even = fma(load(keys, i * LANES), splat(q[i]), even)
        odd = fma(load(keys, i * LANES + LANES), splat(q[i + 1]), odd)
    if head_dim % 2:
        even = fma(load(keys, (head_dim - 1) * LANES), splat(q[head_dim - 1]), even)
    return add(even, odd)


@helper
def _weigh(
    q: Any,
    keys: Any,
    head_dim: int,
    scale: Any,
    cap: Any,
    sink: Any,
    table: Any,
    slabs_per_block: int,
    block_stride: int,
    first: int,
    end: int,
    weights: Any,
) -> Any:
    """exp(score - max) of positions first … end - 1 into weights, 16 at a time; their sum, with
    that of the sink: a score without a position, -infinity where there is none."""
    best = splat(sink)
    first_slab, end_slab = first // LANES, (end + LANES - 1) // LANES
    for slab in range(first_slab, end_slab):
        block = np.int64(table[slab // slabs_per_block])
        at = block * block_stride + slab % slabs_per_block * head_dim * LANES
        scores = mul(_dot_keys(q, advance(keys, at), head_dim), splat(scale))
        if cap > np.float32(0):
            scores = soft_cap(scores, cap)
        start = slab * LANES
        scores = keep_lanes(scores, first - start, end - start, _MINUS_INFINITY)
        store(weights, start, scores)
        best = maximum(best, scores)
    largest = splat(max_lanes(best))
    total = splat(np.float32(0))
    for slab in range(first_slab, end_slab):
        e = exp(sub(load(weights, slab * LANES), largest))
        store(weights, slab * LANES, e)
        total = add(total, e)
    return sum_lanes(total) + max_lanes(exp(sub(splat(sink), largest)))


@helper
def _mix_1(
    weights: Any, values: Any, table: Any, block_tokens: int, stride: int, dim: int, first: int,
    end: int,
) -> Any:  # fmt: skip
    """The weighted sum of 16 dims of the values, in ascending order of positions."""
    acc = splat(np.float32(0))
    for b in range(first // block_tokens, (end - 1) // block_tokens + 1):
        block = advance(values, np.int64(table[b]) * stride)
        start = b * block_tokens
        for t in range(max(first, start), min(end, start + block_tokens)):
            acc = fma(load(block, (t - start) * dim), splat(weights[t]), acc)
    return acc


@helper
def _mix_4(
    weights: Any, values: Any, table: Any, block_tokens: int, stride: int, dim: int, first: int,
    end: int,
) -> Any:  # fmt: skip
    """As _mix_1 for 64 dims."""
    acc0 = splat(np.float32(0))
    acc1, acc2, acc3 = acc0, acc0, acc0
    for b in range(first // block_tokens, (end - 1) // block_tokens + 1):
        block = advance(values, np.int64(table[b]) * stride)
        start = b * block_tokens
        for t in range(max(first, start), min(end, start + block_tokens)):
            at, weight = (t - start) * dim, splat(weights[t])
            acc0 = fma(load(block, at), weight, acc0)
            acc1 = fma(load(block, at + LANES), weight, acc1)
            acc2 = fma(load(block, at + 2 * LANES), weight, acc2)
            acc3 = fma(load(block, at + 3 * LANES), weight, acc3)
    return acc0, acc1, acc2, acc3


@helper
def _mix_latent(
    weights: Any, keys: Any, table: Any, slabs_per_block: int, stride: int, head_dim: int, dim: int,
    first: int, end: int,
) -> Any:  # fmt: skip
    """The weighted sum of one dim of the keys, 16 positions at a time; positions that are not seen
    weigh nothing."""
    acc = splat(np.float32(0))
    for slab in range(first // LANES, (end + LANES - 1) // LANES):
        block = np.int64(table[slab // slabs_per_block])
        at = block * stride + (slab % slabs_per_block * head_dim + dim) * LANES
        acc = fma(load(keys, at), load(weights, slab * LANES), acc)
    return sum_lanes(acc)


@njit(nogil=True)
def _attend(
    x: np.ndarray,
    row: int,
    kv_head: int,
    shape: HeadShape,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    seq: int,
    first: int,
    end: int,
    block_tokens: int,
    scale: Any,
    cap: Any,
    sinks: np.ndarray,
    scratch: np.ndarray,
    out: Any,
) -> None:
    """The query heads of one kv head of one row; their results one after the other at out."""
    heads, kv_heads, head_dim, value_dim, is_latent = shape
    group, padded_dim = heads // kv_heads, (value_dim + LANES - 1) // LANES * LANES
    k_stride, v_stride = kv_heads * block_tokens * head_dim, kv_heads * block_tokens * padded_dim
    k = advance(pointer(keys), kv_head * block_tokens * head_dim)
    v = advance(pointer(values), kv_head * block_tokens * padded_dim)
    blocks, weights = advance(pointer(table), seq * table.shape[1]), pointer(scratch)
    for h in range(group):
        q = advance(pointer(x), row * x.shape[1] + (kv_head * group + h) * head_dim)
        sink = sinks[kv_head * group + h] if sinks.size > 0 else _MINUS_INFINITY
        total = _weigh(
            q, k, head_dim, scale, cap, sink, blocks, block_tokens // LANES, k_stride, first, end,
            weights,
        )  # fmt: skip
        inverse, to = splat(np.float32(1) / total), advance(out, h * value_dim)
        if is_latent:
            for i in range(value_dim):
                to[i] = (np.float32(1) / total) * _mix_latent(
                    weights, k, blocks, block_tokens // LANES, k_stride, head_dim, i, first, end
                )
            continue
        n_wide = padded_dim - padded_dim % (4 * LANES)
        for i in range(0, n_wide, 4 * LANES):
            acc0, acc1, acc2, acc3 = _mix_4(
                weights, advance(v, i), blocks, block_tokens, v_stride, padded_dim, first, end
            )
            store_upto(to, i, value_dim, mul(acc0, inverse))
            store_upto(to, i + LANES, value_dim, mul(acc1, inverse))
            store_upto(to, i + 2 * LANES, value_dim, mul(acc2, inverse))
            store_upto(to, i + 3 * LANES, value_dim, mul(acc3, inverse))
        for i in range(n_wide, padded_dim, LANES):
            acc = _mix_1(
                weights, advance(v, i), blocks, block_tokens, v_stride, padded_dim, first, end
            )
            store_upto(to, i, value_dim, mul(acc, inverse))


@cached_kernel(parallel=True, nogil=True)
def attention(
    x: np.ndarray,
    shape: HeadShape,
    keys: np.ndarray,
    values: np.ndarray,
    block_tokens: int,
    scale: Any,
    cap: Any,
    sinks: np.ndarray,
    window: int,
    both_ways: bool,
    table: np.ndarray,
    row_seq: np.ndarray,
    positions: np.ndarray,
    lengths: np.ndarray,
    out: np.ndarray,
    q8: Q8Views,
    rest: Q8Views,
    n_threads: int,
) -> None:
    """x (max_rows, [q | k | v]); sinks (heads), or empty; out (max_rows, heads * value_dim), or
    empty: then q8 is written, and what that leaves over to rest, if it is not empty."""
    n_items = positions.size * shape.kv_heads
    width = shape.heads // shape.kv_heads * shape.value_dim  # results of an item
    for thread in prange(n_threads):
        scratch = np.empty(table.shape[1] * block_tokens, np.float32)
        mixed = np.empty(width, np.float32)
        # Later rows have more to read, so neighbours go to different threads.
        for item in range(thread, n_items, n_threads):
            row, kv_head = item // shape.kv_heads, item % shape.kv_heads
            position = positions[row]
            first = max(0, position - window + 1) if window > 0 else 0
            end = position + 1
            if both_ways:
                end = min(lengths[row], position + window) if window > 0 else lengths[row]
            _attend(
                x, row, kv_head, shape, keys, values, table, row_seq[row], first, end,
                block_tokens, scale, cap, sinks, scratch, pointer(mixed),
            )  # fmt: skip
            if out.size > 0:
                out[row, kv_head * width : kv_head * width + width] = mixed
            else:
                n_blocks, first = shape.heads * shape.value_dim // BLOCK, kv_head * width // BLOCK
                results = pointer(mixed)
                quantize_planes(results, results, q8, rest, row, n_blocks, first, width // BLOCK)
