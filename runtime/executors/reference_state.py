"""The meaning of the ops with a memory of their own: short convolution, delta rule, scan.

Rows of a sequence are computed one after the other, each from the state that the one before left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..plan import Op
from .reference_math import activated, convolve, sigmoid, softplus
from .reference_run import Run

if TYPE_CHECKING:
    from .reference import ReferenceExecutor


def conv(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    x, bias = run.floats(op.inputs[0]), ex.weight(op, "bias")
    taps, width = op.int_of("taps"), ex.plan.buffers[op.out].width
    kernel = ex.weight(op, "kernel")
    assert kernel is not None
    out = np.empty((len(x), width), np.float32)
    for rows, state in _sequences(ex, run, op):
        own = x[rows, op.int_of("x_col") :][:, :width]
        seen = np.concatenate((state.reshape(taps - 1, width), own))
        out[rows] = convolve(seen, kernel.reshape(width, taps), bias)
        state[:] = seen[len(own) :].reshape(-1)
    run.store(op, activated(op.int_of("activation"), out))


def delta(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    k_heads, v_heads, d = (op.int_of(name) for name in ("k_heads", "v_heads", "head_dim"))
    qkv, rates = run.floats(op.inputs[0]), run.floats(op.inputs[1])
    q, k, v = np.split(qkv, [k_heads * d, 2 * k_heads * d], axis=1)
    q, k = (part.reshape(-1, k_heads, d) for part in (q, k))
    v = v.reshape(-1, v_heads, d)
    q, k = (
        part / np.sqrt(np.sum(part * part, axis=2, keepdims=True) + np.float32(1e-6))
        for part in (q, k)
    )
    h = np.arange(v_heads)
    of_head = h // (v_heads // k_heads) if op.int_of("is_grouped") else h % k_heads
    q, k = q[:, of_head] * np.float32(d**-0.5), k[:, of_head]
    rate, decay = sigmoid(rates[:, :v_heads]), _decay(ex, op, rates[:, v_heads:])[1]
    out = np.empty((len(qkv), v_heads, d), np.float32)
    for rows, state in _sequences(ex, run, op):
        s = state.reshape(v_heads, d, d)
        for r in range(rows.start, rows.stop):
            s *= decay[r][:, None, None]
            wanted = rate[r][:, None] * (v[r] - np.einsum("hkv,hk->hv", s, k[r]))
            s += k[r][:, :, None] * wanted[:, None, :]
            out[r] = np.einsum("hkv,hk->hv", s, q[r])
    run.store(op, out.reshape(len(qkv), -1))


def scan(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    heads, d, groups, n = op.ints[:4]
    xbc, dt_col = run.floats(op.inputs[0]), op.int_of("dt_col")
    x, b, c = np.split(xbc, [heads * d, heads * d + groups * n], axis=1)
    x = x.reshape(-1, heads, d)
    of_head = np.arange(heads) // (heads // groups)
    b, c = (part.reshape(-1, groups, n)[:, of_head] for part in (b, c))
    dt, decay = _decay(ex, op, run.floats(op.inputs[1])[:, dt_col : dt_col + heads])
    skip = ex.weight(op, "d")
    assert skip is not None
    out = np.empty((len(xbc), heads, d), np.float32)
    for rows, state in _sequences(ex, run, op):
        s = state.reshape(heads, n, d)
        for r in range(rows.start, rows.stop):
            s *= decay[r][:, None, None]
            s += b[r][:, :, None] * (dt[r][:, None] * x[r])[:, None, :]
            out[r] = np.einsum("hnd,hn->hd", s, c[r]) + skip[:, None] * x[r]
    run.store(op, out.reshape(len(xbc), -1))


def _decay(ex: ReferenceExecutor, op: Op, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step sizes and decays of each row and head; `a` is negative."""
    a, dt_bias = ex.weight(op, "a"), ex.weight(op, "dt_bias")
    assert a is not None
    assert dt_bias is not None
    dt = softplus(rates + dt_bias)
    return dt, np.exp(dt * a)


def _sequences(ex: ReferenceExecutor, run: Run, op: Op) -> Iterator[tuple[slice, np.ndarray]]:
    """The rows of each sequence, and what the op's layer keeps of it: a view to be updated."""
    step, states = run.step, ex.states[op.int_of("state")]
    for seq, slot in enumerate(step.states):
        rows = slice(step.seq_start[seq], step.seq_start[seq + 1])
        if step.positions[rows][0] == 0:
            states[slot] = 0
        yield rows, states[slot]
