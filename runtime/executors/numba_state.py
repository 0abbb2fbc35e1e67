"""Kernels of recurrent layers and their gates: a sequence's rows in order, channels side by side.

Owns: gate, causal convolution, delta rule, scan. Must not know: plans or steps. A state is what
the layer keeps of a sequence; it is read before the sequence's first row and left as it is behind
its last one that is no guess. Guesses of the step before that were right (replays) come first, from
what was kept of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from martlet.quant.kernel_cache import cached_kernel
from numba import njit, prange

from .numba_math import Q8Views, load_upto, quantize_planes, store_upto
from .numba_rowops import gated
from .numba_vectors import advance, pointer, splat
from .numba_weights import BLOCK, LANES

_kernel = cached_kernel(parallel=True, nogil=True)
_CHANNELS = 256  # that one item takes

Sequences = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of a step: slots of states, first rows, positions of rows, guesses, replays; each int32."""


@_kernel
def gate_rows(
    x: np.ndarray,
    gate: np.ndarray,
    cols: tuple[int, int, int, int],
    activation: int,
    out: np.ndarray,
    q8: Q8Views,
    rest: Q8Views,
    width: int,
    n_rows: int,
) -> None:
    """cols: x_col, gate_col, group, gate_stride."""
    x_col, gate_col, group, stride = cols
    is_q8 = out.size == 0
    for row in prange(n_rows):
        scratch = np.empty(width, np.float32)
        to = pointer(scratch) if is_q8 else advance(pointer(out), row * width)
        values = advance(pointer(x), row * x.shape[1] + x_col)
        gates = advance(pointer(gate), row * gate.shape[1] + gate_col)
        for g in range(0, width, group):
            run = advance(gates, g // group * stride - g)
            stop = min(width, g + group)
            for i in range(g, stop, LANES):
                v = gated(load_upto(run, i, stop), load_upto(values, i, stop), activation)
                store_upto(to, i, stop, v)
        if is_q8:
            quantize_planes(to, to, q8, rest, row, width // BLOCK, 0, width // BLOCK)


@_kernel
def conv_rows(
    x: np.ndarray,
    x_col: int,
    kernel: np.ndarray,
    bias: np.ndarray,
    taps: int,
    activation: int,
    states: np.ndarray,
    kept: np.ndarray,
    seqs: Sequences,
    out: np.ndarray,
) -> None:
    """kernel (channels * taps), states (n_states, (taps - 1) * channels): row by row; kept
    (n_states, n_guesses, channels)."""
    slots, seq_start, positions, guesses, replays = seqs
    width = out.shape[1]
    n_chunks = -(-width // _CHANNELS)
    for item in prange(slots.size * n_chunks):
        seq, first = item // n_chunks, item % n_chunks * _CHANNELS
        stop = min(width, first + _CHANNELS)
        state, start, end = states[slots[seq]], seq_start[seq], seq_start[seq + 1]
        before, n_replays = kept[slots[seq]], replays[seq]
        if positions[start] == 0:
            for s in range(taps - 1):
                state[s * width + first : s * width + stop] = 0
        for row in range(start, end):
            for c in range(first, stop):
                total = bias[c] if bias.size else np.float32(0)
                for j in range(taps):
                    at = row - start - taps + 1 + j
                    if at >= 0:
                        seen = x[start + at, x_col + c]
                    elif n_replays + at >= 0:
                        seen = before[n_replays + at, c]
                    else:
                        seen = state[(taps - 1 + n_replays + at) * width + c]
                    total += kernel[c * taps + j] * seen
                out[row, c] = total
            to = advance(pointer(out), row * width)
            for i in range(first, stop, LANES):
                v = gated(load_upto(to, i, stop), splat(np.float32(1)), activation)
                store_upto(to, i, stop, v)
        n = end - start - guesses[seq]
        for s in range(taps - 1):
            at = n - taps + 1 + s
            for c in range(first, stop):
                if at >= 0:
                    state[s * width + c] = x[start + at, x_col + c]
                elif n_replays + at >= 0:
                    state[s * width + c] = before[n_replays + at, c]
                else:
                    state[s * width + c] = state[(taps - 1 + n_replays + at) * width + c]
        for g in range(guesses[seq]):
            for c in range(first, stop):
                before[g, c] = x[start + n + g, x_col + c]


@njit(nogil=True)
def _recur(
    state: np.ndarray,
    decay: Any,
    rate: Any,
    corrects: bool,
    k: np.ndarray,
    q: np.ndarray,
    v: np.ndarray,
    write: np.ndarray,
    out: np.ndarray,
) -> None:
    """One row of a recurrence over S (keys, values): S = decay * S; w = rate * (v - S.T @ k), or
    rate * v; S += outer(k, w); out = S.T @ q. Keys in ascending order; write is scratch."""
    n_keys, n = state.shape
    write[:] = 0
    out[:] = 0
    for j in range(n_keys):
        for i in range(n):
            state[j, i] *= decay
            write[i] += state[j, i] * k[j]
    for i in range(n):
        write[i] = rate * (v[i] - write[i]) if corrects else rate * v[i]
    for j in range(n_keys):
        for i in range(n):
            state[j, i] += k[j] * write[i]
            out[i] += state[j, i] * q[j]


@njit(nogil=True)
def _state_of_head(
    states: np.ndarray, head: int, n_keys: int, dim: int, position: int
) -> np.ndarray:
    """(n_keys, dim), a view of one sequence's states; zeros if its first row is at position 0."""
    size = n_keys * dim
    state = states[head * size : (head + 1) * size].reshape(n_keys, dim)
    if position == 0:
        state[:] = 0
    return state


@njit(nogil=True)
def _softplus(x: Any) -> Any:
    return x if x > np.float32(20) else np.float32(np.log1p(np.exp(x)))


@njit(nogil=True)
def _unit(x: np.ndarray, scale: Any, out: np.ndarray) -> None:
    """x / sqrt(sum of squares + 1e-6) * scale."""
    squares = np.float32(0)
    for i in range(x.size):
        squares += x[i] * x[i]
    factor = scale / np.float32(np.sqrt(squares + np.float32(1e-6)))
    for i in range(x.size):
        out[i] = x[i] * factor


@_kernel
def delta_rows(
    qkv: np.ndarray,
    rates: np.ndarray,
    a: np.ndarray,
    dt_bias: np.ndarray,
    heads: tuple[int, int, int, int],
    states: np.ndarray,
    kept: np.ndarray,
    seqs: Sequences,
    out: np.ndarray,
) -> None:
    """heads: k_heads, v_heads, head_dim, is_grouped; states (n_states, v_heads * dim * dim); kept
    (n_states, n_guesses, widths of qkv and rates)."""
    slots, seq_start, positions, guesses, replays = seqs
    k_heads, v_heads, dim, is_grouped = heads
    root = np.float32(1) / np.sqrt(np.float32(dim))
    for item in prange(slots.size * v_heads):
        seq, h = item // v_heads, item % v_heads
        k_head = h // (v_heads // k_heads) if is_grouped else h % k_heads
        state = _state_of_head(states[slots[seq]], h, dim, dim, positions[seq_start[seq]])
        q, k, write = (
            np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.float32)
        )  # fmt: skip
        start, end, unread = seq_start[seq], seq_start[seq + 1], np.empty(dim, np.float32)
        for row in range(start - replays[seq], end):
            if row == end - guesses[seq]:
                state = state.copy()
            if row < start:
                x = kept[slots[seq], replays[seq] + row - start]
                by, to = x[qkv.shape[1] :], unread
            else:
                x, by, to = qkv[row], rates[row], out[row, h * dim : (h + 1) * dim]
            rate = np.float32(1) / (np.float32(1) + np.exp(-by[h]))
            decay = np.exp(a[h] * _softplus(by[v_heads + h] + dt_bias[h]))
            _unit(x[k_head * dim : (k_head + 1) * dim], root, q)
            first = (k_heads + k_head) * dim
            _unit(x[first : first + dim], np.float32(1), k)
            first = (2 * k_heads + h) * dim
            _recur(state, decay, rate, True, k, q, x[first : first + dim], write, to)


@_kernel
def scan_rows(
    xbc: np.ndarray,
    dt: np.ndarray,
    dt_col: int,
    a: np.ndarray,
    dt_bias: np.ndarray,
    skip: np.ndarray,
    sizes: tuple[int, int, int, int],
    states: np.ndarray,
    kept: np.ndarray,
    seqs: Sequences,
    out: np.ndarray,
) -> None:
    """sizes: heads, head_dim, groups, state_dim; states (n_states, heads * state_dim * dim); kept
    (n_states, n_guesses, width of xbc and heads)."""
    slots, seq_start, positions, guesses, replays = seqs
    heads, dim, groups, n_keys = sizes
    for item in prange(slots.size * heads):
        seq, h = item // heads, item % heads
        state = _state_of_head(states[slots[seq]], h, n_keys, dim, positions[seq_start[seq]])
        write = np.empty(dim, np.float32)
        b_first = heads * dim + h // (heads // groups) * n_keys
        c_first = b_first + groups * n_keys
        start, end, unread = seq_start[seq], seq_start[seq + 1], np.empty(dim, np.float32)
        for row in range(start - replays[seq], end):
            if row == end - guesses[seq]:
                state = state.copy()
            if row < start:
                inputs = kept[slots[seq], replays[seq] + row - start]
                by, to = inputs[xbc.shape[1] + h], unread
            else:
                inputs, by = xbc[row], dt[row, dt_col + h]
                to = out[row, h * dim : (h + 1) * dim]
            step = _softplus(by + dt_bias[h])
            decay = np.exp(step * a[h])
            b, c = inputs[b_first : b_first + n_keys], inputs[c_first : c_first + n_keys]
            x = inputs[h * dim : (h + 1) * dim]
            _recur(state, decay, step, False, b, c, x, write, to)
            for i in range(dim):
                to[i] += skip[h] * x[i]
