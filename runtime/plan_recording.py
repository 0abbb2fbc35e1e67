"""What a recording consists of: its weights by name, buffers, KV layers and states; and its end.

Owns: the lists that become a Plan. Must not know: which ops there are (plan_builder.py); folding
and placement are plan_passes.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from .errors import ModelError
from .ops import Q8_BLOCK, BufferKind, RowKind
from .plan import Buffer, KvLayer, Op, Plan, PlanTensor
from .plan_passes import fold_glu, fold_quantize, place_buffers


class WeightShapes(Protocol):
    """What recording needs to know of the weights: their shapes and formats, never their values."""

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def format_name(self, name: str) -> str: ...


@dataclass(frozen=True)
class LowRankParts:
    """What an adapter has for one weight: (rank, cols) and (rows, rank), by name."""

    a: str
    b: str
    rank: int
    scale: float


class LowRank(Protocol):
    """What recording needs to know of an adapter."""

    def parts_of(self, weight: str) -> LowRankParts | None: ...


@dataclass
class PlanRecording:
    """Buffers are ids into `buffers`; weights are named as in the GGUF file."""

    weights: WeightShapes
    max_rows: int
    activations: BufferKind = BufferKind.Q8  # rows of products; floats are slower, and exacter
    ops: list[Op] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    tensors: list[PlanTensor] = field(default_factory=list)
    kv_layers: list[KvLayer] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    hidden: int = -1  # the buffer of wanted hidden states
    adapters: Sequence[LowRank] = ()  # in the order in which steps number them
    given_width: int = 0  # of the rows that a step gives
    _tensor_ids: dict[str, int] = field(default_factory=dict)
    _quantized: dict[int, Op] = field(
        default_factory=dict
    )  # f32 buffer -> what made its rounded twin

    # -- names ------------------------------------------------------------------------------

    def weight(self, name: str, *shape: int) -> int:
        """The id of a weight that must exist with this shape, else ModelError."""
        found = self.weights.shape(name)
        if found is None:
            raise ModelError(f"tensor {name!r} is missing from the file; fetch it again")
        if found != shape:
            raise ModelError(f"tensor {name!r} has shape {found}, expected {shape}")
        if name not in self._tensor_ids:
            self._tensor_ids[name] = len(self.tensors)
            self.tensors.append(PlanTensor(name, shape, self.weights.format_name(name)))
        return self._tensor_ids[name]

    def file_rows(self, name: str, *shape: int) -> int:
        """As weight(), of a table too large to be held: its rows are read from the file."""
        weight = self.weight(name, *shape)
        self.tensors[weight] = replace(self.tensors[weight], stays=True)
        return weight

    def optional(self, name: str, *shape: int) -> int:
        """As weight(), but -1 where the file has no such tensor."""
        return self.weight(name, *shape) if self.weights.shape(name) is not None else -1

    def vector(self, name: str, *shape: int) -> int:
        """The id of a small weight that no product takes: floats in one row, whatever its shape."""
        found = self.weights.shape(name)
        if found != shape:
            raise ModelError(f"tensor {name!r} has shape {found}, expected {shape}")
        if name not in self._tensor_ids:
            self._tensor_ids[name] = len(self.tensors)
            self.tensors.append(PlanTensor(name, (math.prod(shape),), "F32"))
        return self._tensor_ids[name]

    def table(self, name: str, values: np.ndarray) -> int:
        """The id of a float64 vector computed at load; others of its name get a number."""
        base, n_same = name, 0
        while name in self._tensor_ids:
            known = self.tensors[self._tensor_ids[name]].values
            if known is not None and np.array_equal(known, values):
                break
            n_same += 1
            name = f"{base}.{n_same}"
        if name not in self._tensor_ids:
            self._tensor_ids[name] = len(self.tensors)
            self.tensors.append(PlanTensor(name, values.shape, "F64", values.astype(np.float64)))
        return self._tensor_ids[name]

    def new_kv_layer(
        self, kv_heads: int, head_dim: int, value_dim: int, *, is_latent: bool = False
    ) -> int:
        if is_latent and value_dim % Q8_BLOCK:
            raise ModelError(
                f"compressed keys of {value_dim} values are not supported, only multiples of "
                f"{Q8_BLOCK}"
            )
        self.kv_layers.append(KvLayer(kv_heads, head_dim, value_dim, is_latent))
        return len(self.kv_layers) - 1

    def new_state(self, width: int, inputs: int) -> int:
        """A recurrent layer that keeps `width` floats of every sequence and reads `inputs` floats
        of a row."""
        self.states.append(width)
        self.inputs.append(inputs)
        return len(self.states) - 1

    def _buffer(
        self,
        name: str,
        width: int,
        kind: BufferKind = BufferKind.F32,
        rows: RowKind = RowKind.ALL,
        per_row: int = 1,
    ) -> int:
        n_same = sum(b.name.split(".")[0] == name for b in self.buffers)
        name = f"{name}.{n_same}" if n_same else name
        self.buffers.append(Buffer(name, kind, rows, width, per_row=per_row))
        return len(self.buffers) - 1

    def _record(self, op: Op) -> int:
        self.ops.append(op)
        self._quantized.pop(op.out, None)  # its contents changed
        return op.out

    # -- finish -----------------------------------------------------------------------------

    def finish(self, *, keep: bool = False) -> Plan:
        """keep: no buffer's memory is used again within a step, see Executor.read_rows."""
        logits = next((b for b in self.buffers if b.is_logits), None)
        if logits is None and self.hidden < 0:
            raise ModelError("the recording has neither logits nor hidden states")
        fold_glu(self.ops, self.tensors)
        fold_quantize(self.ops)
        arena_bytes = place_buffers(self.ops, self.buffers, self.max_rows, keep)
        return Plan(
            self.ops,
            self.buffers,
            self.tensors,
            self.kv_layers,
            self.max_rows,
            logits.width if logits else 0,
            arena_bytes,
            tuple(self.states),
            tuple(self.inputs),
            self.hidden,
            len(self.adapters),
            self.given_width,
        )
