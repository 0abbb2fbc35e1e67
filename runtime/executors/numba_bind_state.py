"""Binds the ops with a memory of their own: gates, short convolution, delta rule, scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plan import Op
from .numba_memory import Call
from .numba_state import conv_rows, delta_rows, scan_rows

if TYPE_CHECKING:
    from .numba_bind import Binder


def bind_conv(b: Binder, op: Op) -> list[Call]:
    x, out = b.floats(op.inputs[0]), b.floats(op.out)
    kernel, bias = (b.vector(op.weight_of(name)) for name in ("kernel", "bias"))
    x_col, taps, activation, state = op.ints
    states = b.memory.states[state]
    return [
        lambda rows: conv_rows(
            x, x_col, kernel, bias, taps, activation, states, rows.states, rows.seq_start,
            rows.positions, out,
        )
    ]  # fmt: skip


def bind_delta(b: Binder, op: Op) -> list[Call]:
    (qkv, rates), out = map(b.floats, op.inputs), b.floats(op.out)
    a, dt_bias = map(b.vector, op.weights)
    *sizes, state = op.ints
    heads: Any = tuple(sizes)
    states = b.memory.states[state]
    return [
        lambda rows: delta_rows(
            qkv, rates, a, dt_bias, heads, states, rows.states, rows.seq_start,
            rows.positions, out,
        )
    ]  # fmt: skip


def bind_scan(b: Binder, op: Op) -> list[Call]:
    (xbc, dt), out = map(b.floats, op.inputs), b.floats(op.out)
    a, dt_bias, skip = map(b.vector, op.weights)
    *shape, dt_col, state = op.ints
    sizes: Any = tuple(shape)
    states = b.memory.states[state]
    return [
        lambda rows: scan_rows(
            xbc, dt, dt_col, a, dt_bias, skip, sizes, states, rows.states, rows.seq_start,
            rows.positions, out,
        )
    ]  # fmt: skip
