"""Binds the ops of mixtures of experts: rows are gathered by expert and multiplied together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ops import RowKind
from ..plan import Op
from .numba_experts import ExpertMatrix, router, sorted_pairs, taken, taken_q8
from .numba_math import Q8Views
from .numba_memory import Call, Rows
from .numba_rowops import glu
from .numba_weights import aligned

if TYPE_CHECKING:
    from .numba_bind import Binder


def bind_router(b: Binder, op: Op) -> list[Call]:
    logits, out, (bias, shares) = b.floats(op.inputs[0]), op.out, map(b.vector, op.weights)
    gating, used, groups, groups_used, renormalizes = op.ints
    sizes = gating, used, groups, groups_used, bool(renormalizes), op.float_of("scale")
    kind, chosen = b.rows_of(op), b.floats(out)
    return [lambda rows: router(logits, bias, *sizes, shares, chosen, rows.counts[kind])]


def _expert_matrix(b: Binder, op: Op, weight: int, *biases: int) -> ExpertMatrix:
    """A stacked weight, and the biases that its experts' rows have, one behind the other."""
    stacked, n_experts = b.pack((b.plan.tensors[weight].name,)), op.int_of("experts")
    parts = [b.vector(bias).reshape(n_experts, -1) for bias in biases]
    return ExpertMatrix.of(stacked, np.concatenate(parts, axis=1).reshape(-1), n_experts)


def _expert_inputs(b: Binder, op: Op) -> tuple[np.ndarray, Q8Views, Q8Views, np.ndarray]:
    x, rest, chosen = op.inputs
    return b.floats(x), b.q8(x), b.q8(rest), b.floats(chosen)


def bind_expert_glu(b: Binder, op: Op) -> list[Call]:
    width = b.plan.buffers[op.out].width
    gate, up, gate_bias, up_bias = op.weights
    alone = up < 0 and b.plan.tensors[gate].shape[1] == width
    if alone:
        parts = [_expert_matrix(b, op, gate, gate_bias)]
    elif up < 0:  # gate holds both
        parts = [_expert_matrix(b, op, gate, gate_bias, up_bias)]
    else:
        parts = [_expert_matrix(b, op, gate, gate_bias), _expert_matrix(b, op, up, up_bias)]
    x, q8, rest, chosen = _expert_inputs(b, op)
    activation, used, sink = op.int_of("activation"), op.int_of("used"), b.sink(op)
    gate_up = aligned((b.plan.max_rows * used, (2 - alone) * width), np.float32)

    def expert_glu(rows: Rows) -> None:
        pairs = sorted_pairs(chosen, rows.counts[RowKind.ALL])
        for expert, at in pairs.of_expert:
            of = pairs.rows[at]
            inputs = taken(x, of), taken_q8(q8, of), taken_q8(rest, of)
            for n, part in enumerate(parts):
                part.multiply(expert, *inputs, gate_up[at], n * width)
        glu(gate_up, activation, alone, *sink, len(pairs.rows))

    return [expert_glu]


def bind_expert_sum(b: Binder, op: Op) -> list[Call]:
    down = _expert_matrix(b, op, *op.weights)
    x, q8, rest, chosen = _expert_inputs(b, op)
    out, adds = b.floats(op.out), op.accumulate

    def expert_sum(rows: Rows) -> None:
        n_rows = rows.counts[RowKind.ALL]
        pairs = sorted_pairs(chosen, n_rows)
        if not adds:
            out[:n_rows] = 0
        for expert, at in pairs.of_expert:
            of = pairs.rows[at]  # each row once: no expert is chosen twice
            y = np.empty((len(of), out.shape[1]), np.float32)
            down.multiply(expert, taken(x, at), taken_q8(q8, at), taken_q8(rest, at), y, 0)
            out[of] += pairs.weights[at, None] * y

    return [expert_sum]
