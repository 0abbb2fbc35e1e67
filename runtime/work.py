"""How much work a step is: multiply-adds and bytes, counted from the plan and the step's arrays.

Owns: the formulas. Must not know: how long anything took, how an executor does it.

Weights are counted once per step, as the file stores them; keys and values once per sequence and
layer, up to the window; states of recurrent layers as they are read and as they are written. Norms,
rope and the gathered embedding rows are small and left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

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

    def __mul__(self, times: int) -> Work:
        return Work(
            self.int8_macs * times,
            self.f32_macs * times,
            self.weight_bytes * times,
            self.kv_bytes * times,
        )

    def with_rows(self, n_rows: float, share: float) -> Work:
        """Of weights that meet so many rows, on average, and of which this share is read."""
        return Work(
            round(self.int8_macs * n_rows),
            round(self.f32_macs * n_rows),
            round(self.weight_bytes * share),
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
    counted = PlanWork(plan, kv_value_bytes)
    return sum(map(counted.of, steps), Work())


def step_work(plan: Plan, step: Step, kv_value_bytes: float = 2) -> Work:
    return PlanWork(plan, kv_value_bytes).of(step)


class PlanWork:
    """The formulas of a plan's ops. Layers are much alike, so each formula is there once, with how
    often: a server is asked for the work of a step many times a second."""

    def __init__(self, plan: Plan, kv_value_bytes: float = 2) -> None:
        formulas = (f for op in plan.ops for f in _formulas(plan, op, kv_value_bytes))
        self._formulas = Counter(formulas)

    def of(self, step: Step) -> Work:
        return sum((f.work(step) * times for f, times in self._formulas.items()), Work())


class _Formula(Protocol):
    """Hashable: equal ones are the same work in every step."""

    def work(self, step: Step) -> Work: ...


def _formulas(plan: Plan, op: Op, kv_value_bytes: float) -> Iterator[_Formula]:
    tensors = [plan.tensors[w] for w in op.weights if w >= 0]
    if op.kind is OpKind.ATTENTION:
        layer = plan.kv_layers[op.int_of("kv_layer")]
        yield _Attention(
            op.int_of("window"),
            op.int_of("heads") * (op.int_of("head_dim") + op.int_of("value_dim")),
            layer.kv_heads * (layer.head_dim + layer.v_dim) * kv_value_bytes,
        )
    elif op.kind in (OpKind.EXPERT_GLU, OpKind.EXPERT_SUM):
        for stack in (t for t in tensors if len(t.shape) == 3):
            yield _Experts(_matrix(stack), op.int_of("experts"), op.int_of("used"), _planes(op))
    elif op.kind in _RECURRENT:
        yield _Recurrence(plan.states[op.int_of("state")], _RECURRENT[op.kind])
    elif op.kind is not OpKind.EMBED:  # which gathers rows of its matrix
        for matrix in (t for t in tensors if len(t.shape) > 1):
            yield _Product(_matrix(matrix), plan.buffers[op.out].rows, _planes(op))


@dataclass(frozen=True)
class _Product:
    """A matrix, whatever its op does beside multiplying."""

    matrix: Work  # with one row
    rows: RowKind
    planes: int

    def work(self, step: Step) -> Work:
        counts = {RowKind.ALL: step.n_rows, RowKind.OUT: step.n_out, RowKind.HIDDEN: step.n_hidden}
        n_rows = counts[self.rows]
        if n_rows == 0:  # no row wants logits: the weights are not read
            return Work()
        return self.matrix.with_rows(n_rows * self.planes, 1.0)


@dataclass(frozen=True)
class _Experts:
    """Every row meets the experts it has chosen. What is read are the weights of all experts that
    any row has chosen: on average, where all are chosen equally often."""

    stack: Work  # all experts with one row
    count: int
    used: int
    planes: int

    def work(self, step: Step) -> Work:
        share = 1 - (1 - self.used / self.count) ** step.n_rows
        return self.stack.with_rows(step.n_rows * self.used * self.planes / self.count, share)


# Multiply-adds of a row for every value of a state: what is seen of it, written to it and read.
_RECURRENT = {OpKind.CONV: 1, OpKind.DELTA: 3, OpKind.SCAN: 2}


@dataclass(frozen=True)
class _Recurrence:
    """The state of every sequence is read and written once a step."""

    values: int
    macs_per_value: int

    def work(self, step: Step) -> Work:
        n_bytes = 2 * STATE_VALUE_BYTES * self.values * (len(step.seq_start) - 1)
        return Work(f32_macs=self.macs_per_value * self.values * step.n_rows, kv_bytes=n_bytes)


@dataclass(frozen=True)
class _Attention:
    window: int  # 0: none
    macs: int  # of a row and position
    n_bytes: float  # of a position's key and value

    def work(self, step: Step) -> Work:
        ends = step.positions.astype(np.int64) + 1
        first = np.maximum(ends - self.window, 0) if self.window else np.zeros_like(ends)
        n_read = _positions_read(step, ends, first)
        return Work(
            int8_macs=int((ends - first).sum()) * self.macs, kv_bytes=round(n_read * self.n_bytes)
        )


def _positions_read(step: Step, ends: np.ndarray, first: np.ndarray) -> int:
    """Positions that the rows of each sequence see, each counted once."""
    starts, stops = step.seq_start[:-1], step.seq_start[1:]
    has_rows = stops > starts
    return int((ends[stops[has_rows] - 1] - first[starts[has_rows]]).sum())


def _planes(op: Op) -> int:
    """A second plane of activations meets the same weights once more."""
    names = OPS[op.kind].inputs
    return 2 if "rest" in names and op.inputs[names.index("rest")] >= 0 else 1


def _matrix(tensor: PlanTensor) -> Work:
    """Of all its rows with one row of activations."""
    macs = math.prod(tensor.shape)
    n_bytes = FORMATS[tensor.format].data_bytes(tensor.shape)
    is_float = tensor.format in FLOAT_FORMATS
    return Work(0 if is_float else macs, macs if is_float else 0, n_bytes)
