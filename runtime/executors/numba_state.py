"""Kernels of recurrent layers and their gates: a sequence's rows in order, channels side by side.

Owns: gate and causal convolution. Must not know: plans or steps. A state is what the layer keeps of
a sequence; it is read before the sequence's first row and left as it is behind its last one.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from .numba_math import Q8Views, load_upto, quantize_planes, store_upto
from .numba_rowops import gated
from .numba_vectors import advance, pointer, splat
from .numba_weights import BLOCK, LANES

_kernel = njit(parallel=True, nogil=True, cache=True)
_CHANNELS = 256  # that one item takes


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
    slots: np.ndarray,
    seq_start: np.ndarray,
    positions: np.ndarray,
    out: np.ndarray,
) -> None:
    """kernel (channels * taps), states (n_states, (taps - 1) * channels): row by row."""
    width = out.shape[1]
    n_chunks = -(-width // _CHANNELS)
    for item in prange(slots.size * n_chunks):
        seq, first = item // n_chunks, item % n_chunks * _CHANNELS
        stop = min(width, first + _CHANNELS)
        state, start, end = states[slots[seq]], seq_start[seq], seq_start[seq + 1]
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
                    else:
                        seen = state[(taps - 1 + at) * width + c]
                    total += kernel[c * taps + j] * seen
                out[row, c] = total
            to = advance(pointer(out), row * width)
            for i in range(first, stop, LANES):
                v = gated(load_upto(to, i, stop), splat(np.float32(1)), activation)
                store_upto(to, i, stop, v)
        n = end - start
        for s in range(taps - 1):
            at = n - taps + 1 + s
            for c in range(first, stop):
                if at >= 0:
                    state[s * width + c] = x[start + at, x_col + c]
                else:
                    state[s * width + c] = state[(taps - 1 + at) * width + c]
