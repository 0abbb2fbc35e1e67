"""The meaning of the ops with a memory of their own: short convolution, delta rule, scan.

Rows of a sequence are computed one after the other, each from the state that the one before left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..plan import Op
from .reference_math import activated, convolve, sigmoid, softplus
from .reference_run import Run

if TYPE_CHECKING:
    from .reference import ReferenceExecutor

Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(state, row of inputs) -> row of outputs; advances the state in place."""


def conv(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    taps, width, x_col = op.int_of("taps"), ex.plan.buffers[op.out].width, op.int_of("x_col")
    kernel, bias = ex.weight(op, "kernel"), ex.weight(op, "bias")
    assert kernel is not None
    by_channel = kernel.reshape(width, taps)

    def rule(state: np.ndarray, x: np.ndarray) -> np.ndarray:
        seen = np.concatenate((state, x)).reshape(taps, width)
        state[:] = seen[1:].reshape(-1)
        return convolve(seen, by_channel, bias)[0]

    x = run.floats(op.inputs[0])[:, x_col : x_col + width]
    run.store(op, activated(op.int_of("activation"), _walked(ex, run, op, x, rule)))


def delta(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    k_heads, v_heads, d = (op.int_of(name) for name in ("k_heads", "v_heads", "head_dim"))
    h = np.arange(v_heads)
    of_head = h // (v_heads // k_heads) if op.int_of("is_grouped") else h % k_heads

    def rule(state: np.ndarray, x: np.ndarray) -> np.ndarray:
        ends = np.cumsum([k_heads * d, k_heads * d, v_heads * d, v_heads])
        q, k, v, b, a = np.split(x, ends)
        q, k, v = q.reshape(k_heads, d), k.reshape(k_heads, d), v.reshape(v_heads, d)
        q, k = (
            part / np.sqrt(np.sum(part * part, axis=1, keepdims=True) + np.float32(1e-6))
            for part in (q, k)
        )
        q, k = q[of_head] * np.float32(d**-0.5), k[of_head]
        rate, decay = sigmoid(b), _decay(ex, op, a)[1]
        s = state.reshape(v_heads, d, d)
        s *= decay[:, None, None]
        wanted = rate[:, None] * (v - np.einsum("hkv,hk->hv", s, k))
        s += k[:, :, None] * wanted[:, None, :]
        return np.einsum("hkv,hk->hv", s, q).reshape(-1)

    inputs = np.concatenate([run.floats(buffer) for buffer in op.inputs], axis=1)
    run.store(op, _walked(ex, run, op, inputs, rule))


def scan(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    heads, d, groups, n, dt_col = op.ints[:5]
    of_head = np.arange(heads) // (heads // groups)
    skip = ex.weight(op, "d")
    assert skip is not None

    def rule(state: np.ndarray, row: np.ndarray) -> np.ndarray:
        x, b, c, dt = np.split(row, np.cumsum([heads * d, groups * n, groups * n]))
        x, (b, c) = x.reshape(heads, d), (part.reshape(groups, n)[of_head] for part in (b, c))
        dt, decay = _decay(ex, op, dt)
        s = state.reshape(heads, n, d)
        s *= decay[:, None, None]
        s += b[:, :, None] * (dt[:, None] * x)[:, None, :]
        return (np.einsum("hnd,hn->hd", s, c) + skip[:, None] * x).reshape(-1)

    xbc, dt = map(run.floats, op.inputs)
    inputs = np.concatenate((xbc, dt[:, dt_col : dt_col + heads]), axis=1)
    run.store(op, _walked(ex, run, op, inputs, rule))


def _decay(ex: ReferenceExecutor, op: Op, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step sizes and decays of each head; `a` is negative."""
    a, dt_bias = ex.weight(op, "a"), ex.weight(op, "dt_bias")
    assert a is not None
    assert dt_bias is not None
    dt = softplus(rates + dt_bias)
    return dt, np.exp(dt * a)


def _walked(ex: ReferenceExecutor, run: Run, op: Op, inputs: np.ndarray, rule: Rule) -> np.ndarray:
    """What the rule makes of every row (n_rows, width). Guesses of a sequence's last step that were
    right come first; its state is left as it is before the guesses of this one."""
    step, layer = run.step, op.int_of("state")
    out = np.empty((step.n_rows, ex.plan.buffers[op.out].width), np.float32)
    for seq, slot in enumerate(step.states):
        rows = slice(step.seq_start[seq], step.seq_start[seq + 1])
        state, guesses = ex.states[layer][slot], ex.guesses[layer][slot]
        if step.positions[rows][0] == 0:
            state[:] = 0
        for x in guesses[: step.replays[seq]]:
            rule(state, x)
        n_guesses = step.guesses[seq]
        kept, guessed = rows.stop - n_guesses, inputs[rows.stop - n_guesses : rows.stop]
        for row in range(rows.start, kept):
            out[row] = rule(state, inputs[row])
        ahead = state.copy()
        for row in range(kept, rows.stop):
            out[row] = rule(ahead, inputs[row])
        guesses[:n_guesses] = guessed
    return out
