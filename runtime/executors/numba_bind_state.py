"""Binds the ops with a memory of their own: gates, short convolution, delta rule, scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plan import Op
from .numba_memory import Call, Rows
from .numba_state import Sequences, conv_rows, delta_rows, scan_rows

if TYPE_CHECKING:
    from .numba_bind import Binder


def bind_conv(b: Binder, op: Op) -> list[Call]:
    x, out = b.floats(op.inputs[0]), b.floats(op.out)
    kernel, bias = (b.vector(op.weight_of(name)) for name in ("kernel", "bias"))
    x_col, taps, activation, state = op.ints
    states, kept = b.memory.states[state], b.memory.guesses[state]
    return [
        lambda rows: conv_rows(
            x, x_col, kernel, bias, taps, activation, states, kept, _sequences(rows), out
        )
    ]


def bind_delta(b: Binder, op: Op) -> list[Call]:
    (qkv, rates), out = map(b.floats, op.inputs), b.floats(op.out)
    a, dt_bias = map(b.vector, op.weights)
    *sizes, state = op.ints
    heads: Any = tuple(sizes)
    states, kept = b.memory.states[state], b.memory.guesses[state]
    return [
        lambda rows: delta_rows(qkv, rates, a, dt_bias, heads, states, kept, _sequences(rows), out),
        lambda rows: _keep(rows, qkv, rates, kept),
    ]


def bind_scan(b: Binder, op: Op) -> list[Call]:
    (xbc, dt), out = map(b.floats, op.inputs), b.floats(op.out)
    a, dt_bias, skip = map(b.vector, op.weights)
    *shape, dt_col, state = op.ints
    sizes: Any = tuple(shape)
    states, kept = b.memory.states[state], b.memory.guesses[state]
    of_heads = dt[:, dt_col : dt_col + shape[0]]
    return [
        lambda rows: scan_rows(
            xbc, dt, dt_col, a, dt_bias, skip, sizes, states, kept, _sequences(rows), out
        ),
        lambda rows: _keep(rows, xbc, of_heads, kept),
    ]


def _sequences(rows: Rows) -> Sequences:
    return rows.states, rows.seq_start, rows.positions, rows.guesses, rows.replays


def _keep(rows: Rows, x: np.ndarray, rates: np.ndarray, kept: np.ndarray) -> None:
    """Once every head has read the guesses of the last step: what was read of those of this one."""
    for seq in np.flatnonzero(rows.guesses):
        n, end = rows.guesses[seq], rows.seq_start[seq + 1]
        guessed = slice(end - n, end)
        kept[rows.states[seq], :n] = np.concatenate((x[guessed], rates[guessed]), axis=1)
