"""How much work a step is: multiply-adds and bytes, counted from the plan and the step's arrays.

Owns: the formulas. Must not know: how long anything took, how an executor does it.

Weights are counted once per step, as the file stores them; keys and values once per sequence and
layer, up to the window; states of recurrent layers as they are read and as they are written. Norms,
rope and the gathered embedding rows are small and left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..quant.formats import FORMATS
from .ops import OPS, KvType, OpKind, RowKind
from .plan import FLOAT_FORMATS, Op, Plan, PlanTensor
from .step import Step

STATE_VALUE_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Multiply-adds by the unit that has to do them, and bytes that have to come from memory."""

    int8_macs: int = 0  # products of weights in blocks, and attention
    f32_macs: int = 0  # products of weights stored as floats
    weight_bytes: int = 0
    kv_bytes: int = 0  # of keys, values and states

    def __add__(self, other: Work) -> Work:
        return Work(
            self.int8_macs + other.int8_macs,
            self.f32_macs + other.f32_macs,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
        )

    @property
    def macs(self) -> int:
        return self.int8_macs + self.f32_macs

    @property
    def n_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Speed:
    """What a machine can do per second."""

    int8_macs: float
    f32_macs: float
    n_bytes: float

    def seconds(self, work: Work) -> tuple[float, float]:
        """The least time for the multiply-adds, and for the bytes."""
        multiply = work.int8_macs / self.int8_macs + work.f32_macs / self.f32_macs
        return multiply, work.n_bytes / self.n_bytes


def kv_value_bytes(plan: Plan, kv_type: KvType) -> float:
    """Bytes of one cached key or value, scales included."""
    return plan.kv_bytes_per_token(kv_type) / max(plan.kv_values_per_token(), 1)


def steps_work(plan: Plan, steps: Iterable[Step], kv_value_bytes: float = 2) -> Work:
    return sum((step_work(plan, step, kv_value_bytes) for step in steps), Work())


def step_work(plan: Plan, step: Step, kv_value_bytes: float = 2) -> Work:
    total = Work()
    for op in plan.ops:
        if op.kind is OpKind.ATTENTION:
            total += _attention(plan, op, step, kv_value_bytes)
        elif op.kind in (OpKind.EXPERT_GLU, OpKind.EXPERT_SUM):
            total += _experts(plan, op, step)
        elif op.kind in _RECURRENT:
            total += _recurrence(plan, op, step)
        elif op.kind is not OpKind.EMBED:  # which gathers rows of its matrix
            total += _products(plan, op, step)
    return total


def _products(plan: Plan, op: Op, step: Step) -> Work:
    """Of all matrices of the op, whatever it does beside multiplying."""
    tensors = (plan.tensors[w] for w in op.weights if w >= 0)
    counts = {RowKind.ALL: step.n_rows, RowKind.OUT: step.n_out, RowKind.HIDDEN: step.n_hidden}
    n_rows = counts[plan.buffers[op.out].rows]
    if n_rows == 0:  # no row wants logits: the weights are not read
        return Work()
    matrices = (t for t in tensors if len(t.shape) > 1)
    return sum((_matrix(t, n_rows * _planes(op), 1.0) for t in matrices), Work())


def _experts(plan: Plan, op: Op, step: Step) -> Work:
    """Every row meets the experts it has chosen. What is read are the weights of all experts that
    any row has chosen: on average, where all are chosen equally often."""
    count, used = op.int_of("experts"), op.int_of("used")
    share = 1 - (1 - used / count) ** step.n_rows
    matrices = (plan.tensors[w] for w in op.weights if w >= 0)
    n_rows = step.n_rows * used * _planes(op) / count
    return sum((_matrix(t, n_rows, share) for t in matrices if len(t.shape) == 3), Work())


# Multiply-adds of a row for every value of a state: what is seen of it, written to it and read.
_RECURRENT = {OpKind.CONV: 1, OpKind.DELTA: 3, OpKind.SCAN: 2}


def _recurrence(plan: Plan, op: Op, step: Step) -> Work:
    """The state of every sequence is read and written once a step."""
    values = plan.states[op.int_of("state")]
    n_bytes = 2 * STATE_VALUE_BYTES * values * (len(step.seq_start) - 1)
    return Work(f32_macs=_RECURRENT[op.kind] * values * step.n_rows, kv_bytes=n_bytes)


def _planes(op: Op) -> int:
    """A second plane of activations meets the same weights once more."""
    names = OPS[op.kind].inputs
    return 2 if "rest" in names and op.inputs[names.index("rest")] >= 0 else 1


def _matrix(tensor: PlanTensor, n_rows: float, share: float) -> Work:
    """Of all its rows with n_rows, on average; this share of it is read."""
    macs = round(math.prod(tensor.shape) * n_rows)
    n_bytes = round(FORMATS[tensor.format].data_bytes(tensor.shape) * share)
    is_float = tensor.format in FLOAT_FORMATS
    return Work(0 if is_float else macs, macs if is_float else 0, n_bytes)


def _attention(plan: Plan, op: Op, step: Step, kv_value_bytes: float) -> Work:
    window = op.int_of("window")
    widths = op.int_of("head_dim") + op.int_of("value_dim")
    layer = plan.kv_layers[op.int_of("kv_layer")]
    positions = step.positions.astype(np.int64)
    first = np.maximum(positions + 1 - window, 0) if window else np.zeros_like(positions)
    n_visible = int((positions + 1 - first).sum())
    n_read = _positions_read(step, positions, first)
    kv_values = n_read * layer.kv_heads * (layer.head_dim + layer.v_dim)
    return Work(
        int8_macs=n_visible * op.int_of("heads") * widths,
        kv_bytes=round(kv_values * kv_value_bytes),
    )


def _positions_read(step: Step, positions: np.ndarray, first: np.ndarray) -> int:
    """Positions that the rows of each sequence see, each counted once."""
    starts, ends = step.seq_start[:-1], step.seq_start[1:]
    has_rows = ends > starts
    return int((positions[ends[has_rows] - 1] + 1 - first[starts[has_rows]]).sum())
