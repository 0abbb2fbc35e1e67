"""A model as a flat list of ops over buffers in one arena.

Owns: the plan, its records for C, and the printed form that the golden tests compare. Must not
know: weights' bytes, how an op is computed, how it is recorded (plan_builder.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ops import (
    BUFFER_DTYPE,
    FLAG_ACCUMULATE,
    KV_LAYER_DTYPE,
    OP_DTYPE,
    OPS,
    BufferKind,
    EmbedBy,
    KvType,
    OpKind,
    RowKind,
    q8_row_bytes,
)

FLOAT_FORMATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class PlanTensor:
    """A weight of the file, or a table computed at load (then `values` holds it).

    Matrices of all experts are one tensor (experts, rows, cols). A vector has one dimension here,
    whatever its shape in the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    values: np.ndarray | None = None
    stays: bool = False  # in the file, of which rows are read when they are asked for


@dataclass
class Buffer:
    name: str
    kind: BufferKind
    rows: RowKind
    width: int
    is_logits: bool = False
    per_row: int = 1
    """Rows for every row of the step: more than one where there is one per chosen expert."""
    offset: int = -1

    @property
    def row_bytes(self) -> int:
        return self.width * 4 if self.kind is BufferKind.F32 else q8_row_bytes(self.width)

    @property
    def shape_text(self) -> str:
        return f"{self.per_row} x {self.width}" if self.per_row > 1 else str(self.width)


@dataclass
class Op:
    kind: OpKind
    out: int
    inputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    accumulate: bool = False
    out_rest: int = -1  # what a Q8 `out` leaves over

    @property
    def outs(self) -> tuple[int, ...]:
        """Every buffer the op writes."""
        return (self.out, self.out_rest) if self.out_rest >= 0 else (self.out,)

    def int_of(self, name: str) -> int:
        return self.ints[OPS[self.kind].ints.index(name)]

    def float_of(self, name: str) -> float:
        return self.floats[OPS[self.kind].floats.index(name)]

    def weight_of(self, name: str) -> int:
        return self.weights[OPS[self.kind].weights.index(name)]


@dataclass(frozen=True)
class KvLayer:
    kv_heads: int
    head_dim: int
    value_dim: int
    is_latent: bool = False  # values are the first value_dim values of the keys, kept once

    @property
    def v_dim(self) -> int:
        """Values of a head that are kept besides its key."""
        return 0 if self.is_latent else self.value_dim

    def head_bytes(self, kv_type: KvType) -> int:
        """Of one token and kv head."""
        return kv_type.head_bytes(self.head_dim) + kv_type.head_bytes(self.v_dim)


@dataclass
class Plan:
    """A finished recording. `max_rows` bounds the rows of a step and sets the arena's size."""

    ops: list[Op]
    buffers: list[Buffer]
    tensors: list[PlanTensor]
    kv_layers: list[KvLayer]
    max_rows: int
    vocab_size: int
    arena_bytes: int
    states: tuple[int, ...] = ()
    """Floats that a sequence has in each recurrent layer."""
    inputs: tuple[int, ...] = ()
    """Floats that each recurrent layer reads of a row."""
    hidden: int = -1
    """The buffer of wanted hidden states: rows as the output projection takes them."""
    n_adapters: int = 0
    """Adapters that a step can give a sequence something of."""
    given_width: int = 0
    """Values of each row that a step gives beside its token."""

    def op_records(self) -> np.ndarray:
        """The ops as C's mt_op array, shape (n_ops,)."""
        records = np.zeros(len(self.ops), OP_DTYPE)
        for record, op in zip(records, self.ops, strict=True):
            record["kind"], record["out"], record["out_rest"] = op.kind, op.out, op.out_rest
            record["flags"] = FLAG_ACCUMULATE if op.accumulate else 0
            for key, values, empty in (
                ("in", op.inputs, -1),
                ("w", op.weights, -1),
                ("i", op.ints, 0),
                ("f", op.floats, 0.0),
            ):
                record[key] = empty
                record[key][: len(values)] = values
        return records

    def buffer_records(self) -> np.ndarray:
        """The buffers as C's mt_buffer array, shape (n_buffers,)."""
        records = np.zeros(len(self.buffers), BUFFER_DTYPE)
        for record, b in zip(records, self.buffers, strict=True):
            place = (max(b.offset, 0), b.row_bytes)
            values = (b.kind, b.rows, b.width, b.is_logits, b.per_row, 0, *place)
            for key, value in zip(BUFFER_DTYPE.names or (), values, strict=True):
                record[key] = value
        return records

    def kv_records(self) -> np.ndarray:
        """The KV layers as C's mt_kv_layer array, shape (n_kv_layers,)."""
        rows = [
            (k.kv_heads, k.head_dim, k.value_dim, window > 0, k.is_latent)
            for k, window in zip(self.kv_layers, self.kv_windows(), strict=True)
        ]
        return np.array(rows, KV_LAYER_DTYPE)

    @property
    def state_bytes(self) -> int:
        """Of one sequence, whatever its length, in all recurrent layers."""
        return 4 * sum(self.states)

    @property
    def guess_bytes(self) -> int:
        """Of one row that may be taken back: what all recurrent layers read of it."""
        return 4 * sum(self.inputs)

    @property
    def hidden_width(self) -> int:
        return self.buffers[self.hidden].width if self.hidden >= 0 else 0

    def kv_windows(self) -> list[int]:
        """Per KV layer, how many positions back a row sees of it at most; 0: all of them, or some
        beyond its own."""
        seen: list[list[int]] = [[] for _ in self.kv_layers]
        for op in self.ops:
            if op.kind is OpKind.ATTENTION:
                window = 0 if op.int_of("both_ways") else op.int_of("window")
                seen[op.int_of("kv_layer")].append(window)
        return [max(windows) if windows and all(windows) else 0 for windows in seen]

    @property
    def sees_ahead(self) -> bool:
        """Rows see later ones of their step, so that a prompt must be computed in one."""
        return any(op.kind is OpKind.ATTENTION and op.int_of("both_ways") for op in self.ops)

    def experts_alone(self) -> frozenset[int]:
        """Stacks of experts' matrices, by place among the tensors; those that no other op reads."""
        stacks: set[int] = set()
        others: set[int] = set()
        for op in self.ops:
            n = {OpKind.EXPERT_GLU: 2, OpKind.EXPERT_SUM: 1}.get(op.kind, 0)
            stacks |= {w for w in op.weights[:n] if w >= 0}
            others |= {w for w in op.weights[n:] if w >= 0}
        return frozenset(stacks - others)

    @property
    def most_positions(self) -> int:
        """Rows of the shortest table that is embedded by position; 0: there is none."""
        tables = [
            self.tensors[op.weights[0]].shape[0]
            for op in self.ops
            if op.kind is OpKind.EMBED and op.int_of("by") == EmbedBy.POSITION
        ]
        return min(tables, default=0)

    @property
    def window(self) -> int:
        """What windowed layers must keep: the longest window; 0: no layer has one."""
        return max(self.kv_windows(), default=0)

    def kv_values_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return sum(k.kv_heads * (k.head_dim + k.v_dim) for k in self.kv_layers)

    def kv_bytes_per_token(self, kv_type: KvType = KvType.F16) -> int:
        """Bytes that the keys and values of one token need in all layers."""
        return sum(self.kv_group_bytes(kv_type))

    def kv_group_bytes(self, kv_type: KvType = KvType.F16) -> tuple[int, int]:
        """Of one token: in layers that see all positions, and in those with a window."""
        groups = [0, 0]
        for k, window in zip(self.kv_layers, self.kv_windows(), strict=True):
            groups[window > 0] += k.kv_heads * k.head_bytes(kv_type)
        return groups[0], groups[1]

    def __str__(self) -> str:
        return "\n".join(self._op_line(op) for op in self.ops) + "\n"

    def _op_line(self, op: Op) -> str:
        spec = OPS[op.kind]
        outs = [self.buffers[b] for b in op.outs]
        reads = [self.buffers[b].name for b in op.inputs if b >= 0]
        reads += [
            f"{name}={self.tensors[w].name}"
            for name, w in zip(spec.weights, op.weights, strict=False)
            if w >= 0
        ]
        attributes = [
            f"{k}={v}" for k, v in zip(spec.ints, op.ints, strict=True) if v or k not in spec.unsaid
        ]
        attributes += [
            f"{k}={v:.6g}"
            for k, v in zip(spec.floats, op.floats, strict=True)
            if v or k not in spec.unsaid
        ]
        sign = "+=" if op.accumulate else "="
        writes = ", ".join(f"{b.name}:{b.kind.name.lower()}[{b.shape_text}]" for b in outs)
        args = ", ".join(reads + attributes)
        return f"{writes} {sign} {op.kind.name.lower()}({args})"
