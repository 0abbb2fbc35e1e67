"""The meaning of the ops of mixtures of experts: which ones a row takes, and their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ops import Gating
from ..plan import Op
from .reference_math import GATES, best_groups, gated, softmax
from .reference_run import Run

if TYPE_CHECKING:
    from .reference import ReferenceExecutor


def router(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    logits, bias = run.floats(op.inputs[0]), ex.weight(op, "bias")
    used, gating = op.int_of("used"), Gating(op.int_of("gating"))
    p = GATES[gating](logits)
    scores = p if bias is None else p + bias
    if op.int_of("groups") > 1:
        scores = best_groups(scores, op.int_of("groups"), op.int_of("groups_used"))
    # Of equal ones a stable sort leaves the first in front.
    ids = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :used], axis=1)
    weights = np.take_along_axis(p, ids, axis=1)
    if gating is Gating.CHOSEN:
        weights = softmax(weights)
    if op.int_of("renormalize"):
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    weights = weights * np.float32(op.float_of("scale"))
    shares = ex.weight(op, "shares")
    weights = weights if shares is None else weights * shares[ids]
    run.store(op, np.concatenate([ids.astype(np.float32), weights], axis=1))


def expert_glu(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    pairs, x = run.pairs(op), run.planes(op)
    gate, up = ex.weight(op, "gate"), ex.weight(op, "up")
    assert gate is not None
    if up is None and gate.shape[1] > ex.plan.buffers[op.out].width:
        gate, up = np.split(gate, 2, axis=1)
    gate_bias, up_bias = (_expert_bias(ex, op, name, gate) for name in ("gate_bias", "up_bias"))
    out = [
        gated(
            op.int_of("activation"),
            gate[e] @ x[row] + gate_bias[e],
            np.float32(1) if up is None else up[e] @ x[row] + up_bias[e],
        )
        for row, e in zip(pairs.rows, pairs.experts, strict=True)
    ]
    run.store(op, np.array(out, np.float32))


def expert_sum(ex: ReferenceExecutor, run: Run, op: Op) -> None:
    pairs, x, down = run.pairs(op), run.planes(op), ex.weight(op, "down")
    assert down is not None
    bias = _expert_bias(ex, op, "bias", down)
    total = np.zeros((len(run.step.tokens), down.shape[1]), np.float32)
    for at, (row, e) in enumerate(zip(pairs.rows, pairs.experts, strict=True)):
        total[row] += pairs.weights[at] * (down[e] @ x[at] + bias[e])
    run.store(op, total)


def _expert_bias(ex: ReferenceExecutor, op: Op, name: str, weight: np.ndarray) -> np.ndarray:
    """(experts, rows) of a stacked weight; zeros where it has none."""
    bias = ex.weight(op, name)
    shape = weight.shape[:2]
    return np.zeros(shape, np.float32) if bias is None else bias.reshape(shape)
