"""Binds each op of a plan to its numba kernel and to the arrays that the kernel reads and writes.

Owns: packed weights, and which kernel an op calls with what. Must not know: models, schedulers,
threads, or the arithmetic inside kernels. Called once, at load, by numba_executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..ops import BufferKind, KvType, OpKind, RopeStyle, RowKind
from ..plan import FLOAT_FORMATS, Op, Plan, PlanTensor
from ..step import Step
from ..weights import WeightSource, finite_values
from .numba_attention import attention
from .numba_experts import ExpertMatrix, router, sorted_pairs, taken, taken_q8
from .numba_math import Q8Views
from .numba_matmul import linear_float, linear_quantized
from .numba_rowops import (
    HeadOrder,
    HeadShape,
    add_gated,
    embed_float,
    embed_quantized,
    glu,
    norm,
    quantize_rows,
    rope_kv,
    rope_table,
    scale_rows,
)
from .numba_state import conv_rows, delta_rows, gate_rows, scan_rows
from .numba_weights import (
    LANES,
    RECIPES,
    FloatMatrix,
    QuantizedMatrix,
    aligned,
    pack_floats,
    pack_quantized,
)

_KV_DTYPES = {KvType.F16: np.uint16, KvType.F32: np.float32}  # uint16: the bits of float16
_NO_FLOATS = np.empty((0, 0), np.float32)
_NO_WEIGHT = np.empty(0, np.float32)
_NO_Q8 = Q8Views(*(np.empty((0, 0), dtype) for dtype in (np.int8, np.int32, np.float32)))


@dataclass(frozen=True)
class Rows:
    """A step's arrays as the kernels want them."""

    tokens: np.ndarray  # (n_rows) int32
    positions: np.ndarray  # (n_rows) int32
    row_seq: np.ndarray  # (n_rows) int32 index into block_table
    slots: tuple[np.ndarray, np.ndarray]  # (n_rows) int32: in full layers, in windowed ones
    tables: tuple[np.ndarray, np.ndarray]  # (n_seqs, table_width) int32: the same
    out_rows: np.ndarray  # (n_out) int32
    hidden_rows: np.ndarray  # (n_hidden) int32
    seq_start: np.ndarray  # (n_seqs + 1) int32
    states: np.ndarray  # (n_seqs) int32
    counts: dict[RowKind, int]

    @classmethod
    def of(cls, step: Step, block_tokens: int) -> Rows:
        # Copies, because numba compiles every kernel again for a read-only array.
        tokens, positions, table, window_table, out_rows, hidden_rows, seq_start, states = (
            np.array(a, np.int32, order="C")
            for a in (
                step.tokens, step.positions, step.block_table, step.window_table, step.out_rows,
                step.hidden_rows, step.seq_start, step.states,
            )
        )  # fmt: skip
        row_seq = np.repeat(np.arange(step.n_seqs, dtype=np.int32), np.diff(step.seq_start))
        places, within = positions // block_tokens, positions % np.int32(block_tokens)
        slots = table[row_seq, places] * np.int32(block_tokens) + within
        window_slots = window_table[row_seq, places] * np.int32(block_tokens) + within
        counts = {
            RowKind.ALL: len(tokens), RowKind.OUT: len(out_rows), RowKind.HIDDEN: len(hidden_rows),
        }  # fmt: skip
        both, tables = (slots, window_slots), (table, window_table)
        return cls(
            tokens, positions, row_seq, both, tables, out_rows, hidden_rows, seq_start, states,
            counts,
        )  # fmt: skip


Call = Callable[[Rows], None]


@dataclass(frozen=True)
class Memory:
    """What ops read and write: buffers by buffer id, and the KV pool by layer."""

    floats: list[np.ndarray]  # the logits' entry is replaced in every step
    q8: list[Q8Views]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    block_tokens: int
    is_windowed: list[bool]
    states: list[np.ndarray]  # by recurrent layer: (n_states, floats of a sequence)

    @classmethod
    def of(
        cls,
        plan: Plan,
        block_tokens: int,
        n_blocks: int,
        n_window_blocks: int,
        n_states: int,
        kv_type: KvType,
    ) -> Memory:
        arena = aligned((plan.arena_bytes,), np.uint8)
        floats, q8 = [_NO_FLOATS] * len(plan.buffers), [_NO_Q8] * len(plan.buffers)
        for i, b in enumerate(plan.buffers):
            if b.offset < 0:
                continue
            n_rows = plan.max_rows * b.per_row
            rows = arena[b.offset : b.offset + b.row_bytes * n_rows].reshape(n_rows, b.row_bytes)
            if b.kind is BufferKind.Q8:
                q8[i] = Q8Views(rows.view(np.int8), rows.view(np.int32), rows.view(np.float32))
            else:
                floats[i] = rows.view(np.float32)
        dtype, is_windowed = _KV_DTYPES[kv_type], [window > 0 for window in plan.kv_windows()]
        keys, values = [], []
        for k, windowed in zip(plan.kv_layers, is_windowed, strict=True):
            n_slots = (n_window_blocks if windowed else n_blocks) * block_tokens
            width = -(-k.value_dim // LANES) * LANES
            keys.append(np.zeros(n_slots * k.kv_heads * k.head_dim, dtype))
            values.append(np.zeros(n_slots * k.kv_heads * width, dtype))
        states = [np.zeros((n_states, width), np.float32) for width in plan.states]
        return cls(floats, q8, keys, values, block_tokens, is_windowed, states)

    def layer(self, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        return self.keys[n], self.values[n], self.block_tokens


class Binder:
    def __init__(self, plan: Plan, weights: WeightSource, memory: Memory, n_threads: int) -> None:
        self._plan = plan
        self._weights = weights
        self._memory = memory
        self._n_threads = n_threads
        self._packed: dict[tuple[str, ...], QuantizedMatrix | FloatMatrix] = {}

    def calls(self) -> list[Call]:
        """The calls that are one step, in order."""
        bind = self._binders()
        return [call for op in self._plan.ops for call in bind[op.kind](op)]

    def _pack(self, names: tuple[str, ...]) -> QuantizedMatrix | FloatMatrix:
        if names not in self._packed:
            is_float = self._weights.format_name(names[0]) in FLOAT_FORMATS
            self._packed[names] = (
                pack_floats(names, self._weights)
                if is_float
                else pack_quantized(names, self._weights, self._n_threads)
            )
        return self._packed[names]

    def _vector(self, tensor: int) -> np.ndarray:
        """A tensor of one dimension as floats (float64 for tables), empty where there is none."""
        if tensor < 0:
            return _NO_WEIGHT
        found = self._plan.tensors[tensor]
        if found.values is not None:
            return found.values
        return finite_values(self._weights, found.name).reshape(-1)

    def _floats(self, buffer: int) -> np.ndarray:
        return self._memory.floats[buffer] if buffer >= 0 else _NO_FLOATS

    def _q8(self, buffer: int) -> Q8Views:
        return self._memory.q8[buffer] if buffer >= 0 else _NO_Q8

    def _sink(self, op: Op) -> tuple[np.ndarray, Q8Views, Q8Views]:
        """The op's output as floats, or quantized and what that leaves over; the others empty."""
        return self._floats(op.out), self._q8(op.out), self._q8(op.out_rest)

    def _rows_of(self, op: Op) -> RowKind:
        return self._plan.buffers[op.out].rows

    # -- ops: each method returns the calls that do the op -----------------------------------

    def _binders(self) -> dict[OpKind, Callable[[Op], list[Call]]]:
        return {
            OpKind.EMBED: self._embed,
            OpKind.NORM: self._norm,
            OpKind.QUANTIZE: self._quantize,
            OpKind.LINEAR: self._linear,
            OpKind.ROPE_TABLE: self._rope_table,
            OpKind.ROPE_KV: self._rope_kv,
            OpKind.ATTENTION: self._attention,
            OpKind.GLU: self._glu,
            OpKind.ADD: self._add,
            OpKind.TAKE_ROWS: self._take_rows,
            OpKind.LINEAR_GLU: self._linear_glu,
            OpKind.SCALE: self._scale,
            OpKind.GATE: self._gate,
            OpKind.CONV: self._conv,
            OpKind.DELTA: self._delta,
            OpKind.SCAN: self._scan,
            OpKind.ROUTER: self._router,
            OpKind.EXPERT_GLU: self._expert_glu,
            OpKind.EXPERT_SUM: self._expert_sum,
        }

    def _embed(self, op: Op) -> list[Call]:
        table = self._pack((self._plan.tensors[op.weight_of("table")].name,))
        scale, out = np.float32(op.float_of("scale")), self._floats(op.out)
        if isinstance(table, QuantizedMatrix):
            quantized = table  # the type of a captured variable is not narrowed
            return [lambda rows: embed_quantized(quantized, rows.tokens, scale, out)]
        floats = table
        return [lambda rows: embed_float(floats, rows.tokens, scale, out)]

    def _norm(self, op: Op) -> list[Call]:
        x, weight = self._floats(op.inputs[0]), self._vector(op.weight_of("weight"))
        bias, centered = self._vector(op.weight_of("bias")), bool(op.int_of("centered"))
        group, eps, adds = op.int_of("group"), np.float32(op.float_of("eps")), op.accumulate
        (out, q8, rest), kind = self._sink(op), self._rows_of(op)
        return [
            lambda rows: norm(
                x, weight, bias, group, centered, eps, out, adds, q8, rest, rows.counts[kind]
            )
        ]

    def _quantize(self, op: Op) -> list[Call]:
        x, kind, (_, q8, rest) = self._floats(op.inputs[0]), self._rows_of(op), self._sink(op)
        return [lambda rows: quantize_rows(x, q8, rest, rows.counts[kind])]

    def _linear(self, op: Op) -> list[Call]:
        # The logits are another array in every step, so `out` is looked up then.
        floats, out, col = self._memory.floats, op.out, op.int_of("out_col")
        return self._products(op, 3, lambda: floats[out], col)

    def _linear_glu(self, op: Op) -> list[Call]:
        gate_up = aligned((self._plan.max_rows, 2 * self._plan.buffers[op.out].width), np.float32)
        products = self._products(op, 2, lambda: gate_up, 0)
        return [*products, self._glu_call(op, gate_up)]

    def _products(
        self, op: Op, n_weights: int, out: Callable[[], np.ndarray], col: int
    ) -> list[Call]:
        """The op's weights times its rows: one call for each run of weights of one form."""
        pairs = zip(op.weights[:n_weights], op.weights[n_weights:], strict=True)
        segments = [(self._plan.tensors[w], self._vector(b)) for w, b in pairs if w >= 0]
        calls = []
        for _, run in groupby(segments, lambda segment: _form(segment[0].format)):
            parts = list(run)
            matrix = self._pack(tuple(tensor.name for tensor, _ in parts))
            calls.append(self._product(op, matrix, _stacked_bias(parts), out, col))
            col += matrix.n_rows
        return calls

    def _product(
        self,
        op: Op,
        w: QuantizedMatrix | FloatMatrix,
        bias: np.ndarray,
        out: Callable[[], np.ndarray],
        col: int,
    ) -> Call:
        adds, kind = op.accumulate, self._rows_of(op)
        if isinstance(w, QuantizedMatrix):
            q8, rest = self._q8(op.inputs[0]), self._q8(op.inputs[1])
            return lambda rows: linear_quantized(
                w, bias, q8, rest, rows.counts[kind], out(), col, adds
            )
        x = self._floats(op.inputs[0])
        return lambda rows: linear_float(w, bias, x, rows.counts[kind], out(), col, adds)

    def _rope_table(self, op: Op) -> list[Call]:
        inv_freq, out = self._vector(op.weight_of("inv_freq")), self._floats(op.out)
        factor = op.float_of("factor")
        return [lambda rows: rope_table(rows.positions, inv_freq, factor, out)]

    def _rope_kv(self, op: Op) -> list[Call]:
        qkv, trig = self._floats(op.out), self._floats(op.inputs[1])
        q_norm, k_norm = self._vector(op.weight_of("q_norm")), self._vector(op.weight_of("k_norm"))
        shape, eps = HeadShape(*op.ints[:4]), np.float32(op.float_of("eps"))
        n_rot, is_half = op.int_of("n_rot"), op.int_of("style") == RopeStyle.HALF
        temperature = float(np.float32(op.float_of("temperature")))
        order = HeadOrder(bool(op.int_of("norm_after")), temperature, op.int_of("temperature_span"))
        keys, values, block_tokens = self._memory.layer(op.int_of("kv_layer"))
        group = int(self._memory.is_windowed[op.int_of("kv_layer")])
        return [
            lambda rows: rope_kv(
                qkv, trig, q_norm, k_norm, eps, shape, n_rot, is_half, order, rows.positions,
                rows.slots[group], keys, values, block_tokens,
            )
        ]  # fmt: skip

    def _attention(self, op: Op) -> list[Call]:
        x, (out, q8, rest) = self._floats(op.inputs[0]), self._sink(op)
        shape, scale = HeadShape(*op.ints[:4]), np.float32(op.float_of("scale"))
        window, cap, n_threads = op.int_of("window"), op.float_of("cap"), self._n_threads
        cap = np.float32(cap)
        keys, values, block_tokens = self._memory.layer(op.int_of("kv_layer"))
        group = int(self._memory.is_windowed[op.int_of("kv_layer")])
        return [
            lambda rows: attention(
                x, shape, keys, values, block_tokens, scale, cap, window, rows.tables[group],
                rows.row_seq, rows.positions, out, q8, rest, n_threads,
            )
        ]  # fmt: skip

    def _glu(self, op: Op) -> list[Call]:
        return [self._glu_call(op, self._floats(op.inputs[0]))]

    def _glu_call(self, op: Op, gate_up: np.ndarray) -> Call:
        activation, kind, (out, q8, rest) = (
            op.int_of("activation"), self._rows_of(op), self._sink(op)
        )  # fmt: skip
        return lambda rows: glu(gate_up, activation, out, q8, rest, rows.counts[kind])

    def _gate(self, op: Op) -> list[Call]:
        x, gate, (out, q8, rest) = *map(self._floats, op.inputs), self._sink(op)
        *cols, activation = op.ints
        runs: Any = tuple(cols)
        width, kind = self._plan.buffers[op.out].width, self._rows_of(op)
        return [
            lambda rows: gate_rows(
                x, gate, runs, activation, out, q8, rest, width, rows.counts[kind]
            )
        ]  # fmt: skip

    def _conv(self, op: Op) -> list[Call]:
        x, out = self._floats(op.inputs[0]), self._floats(op.out)
        kernel, bias = (self._vector(op.weight_of(name)) for name in ("kernel", "bias"))
        x_col, taps, activation, state = op.ints
        states = self._memory.states[state]
        return [
            lambda rows: conv_rows(
                x, x_col, kernel, bias, taps, activation, states, rows.states, rows.seq_start,
                rows.positions, out,
            )
        ]  # fmt: skip

    def _delta(self, op: Op) -> list[Call]:
        (qkv, rates), out = map(self._floats, op.inputs), self._floats(op.out)
        a, dt_bias = map(self._vector, op.weights)
        *sizes, state = op.ints
        heads: Any = tuple(sizes)
        states = self._memory.states[state]
        return [
            lambda rows: delta_rows(
                qkv, rates, a, dt_bias, heads, states, rows.states, rows.seq_start,
                rows.positions, out,
            )
        ]  # fmt: skip

    def _scan(self, op: Op) -> list[Call]:
        (xbc, dt), out = map(self._floats, op.inputs), self._floats(op.out)
        a, dt_bias, skip = map(self._vector, op.weights)
        *shape, dt_col, state = op.ints
        sizes: Any = tuple(shape)
        states = self._memory.states[state]
        return [
            lambda rows: scan_rows(
                xbc, dt, dt_col, a, dt_bias, skip, sizes, states, rows.states, rows.seq_start,
                rows.positions, out,
            )
        ]  # fmt: skip

    def _router(self, op: Op) -> list[Call]:
        logits, bias, out = self._floats(op.inputs[0]), self._vector(op.weights[0]), op.out
        gating, used, groups, groups_used, renormalizes = op.ints
        sizes = gating, used, groups, groups_used, bool(renormalizes), op.float_of("scale")
        kind, chosen = self._rows_of(op), self._floats(out)
        return [lambda rows: router(logits, bias, *sizes, chosen, rows.counts[kind])]

    def _expert_matrix(self, op: Op, weight: int, *biases: int) -> ExpertMatrix:
        """A stacked weight, and the biases that its experts' rows have, one behind the other."""
        stacked, n_experts = self._pack((self._plan.tensors[weight].name,)), op.int_of("experts")
        parts = [self._vector(bias).reshape(n_experts, -1) for bias in biases]
        return ExpertMatrix.of(stacked, np.concatenate(parts, axis=1).reshape(-1), n_experts)

    def _expert_inputs(self, op: Op) -> tuple[np.ndarray, Q8Views, Q8Views, np.ndarray]:
        x, rest, chosen = op.inputs
        return self._floats(x), self._q8(x), self._q8(rest), self._floats(chosen)

    def _expert_glu(self, op: Op) -> list[Call]:
        width = self._plan.buffers[op.out].width
        gate, up, gate_bias, up_bias = op.weights
        if up < 0:  # gate holds both
            parts = [self._expert_matrix(op, gate, gate_bias, up_bias)]
        else:
            parts = [self._expert_matrix(op, gate, gate_bias), self._expert_matrix(op, up, up_bias)]
        x, q8, rest, chosen = self._expert_inputs(op)
        activation, used, sink = op.int_of("activation"), op.int_of("used"), self._sink(op)
        gate_up = aligned((self._plan.max_rows * used, 2 * width), np.float32)

        def expert_glu(rows: Rows) -> None:
            pairs = sorted_pairs(chosen, rows.counts[RowKind.ALL])
            for expert, at in pairs.of_expert:
                of = pairs.rows[at]
                inputs = taken(x, of), taken_q8(q8, of), taken_q8(rest, of)
                for n, part in enumerate(parts):
                    part.multiply(expert, *inputs, gate_up[at], n * width)
            glu(gate_up, activation, *sink, len(pairs.rows))

        return [expert_glu]

    def _expert_sum(self, op: Op) -> list[Call]:
        down = self._expert_matrix(op, *op.weights)
        x, q8, rest, chosen = self._expert_inputs(op)
        out, adds = self._floats(op.out), op.accumulate

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

    def _add(self, op: Op) -> list[Call]:
        x, out, kind = self._floats(op.inputs[0]), self._floats(op.out), self._rows_of(op)
        by, gate = self._floats(op.inputs[1]), self._vector(op.weight_of("gate"))

        def add(rows: Rows) -> None:
            n = rows.counts[kind]
            if gate.size:
                add_gated(x, by, gate, out, n)
            else:
                out[:n] += x[:n]

        return [add]

    def _scale(self, op: Op) -> list[Call]:
        floats, out, kind = self._memory.floats, op.out, self._rows_of(op)
        scale, cap = np.float32(op.float_of("scale")), np.float32(op.float_of("cap"))
        return [lambda rows: scale_rows(floats[out], scale, cap, rows.counts[kind])]

    def _take_rows(self, op: Op) -> list[Call]:
        x, out = self._floats(op.inputs[0]), self._floats(op.out)

        is_hidden = self._rows_of(op) is RowKind.HIDDEN

        def take_rows(rows: Rows) -> None:
            taken = rows.hidden_rows if is_hidden else rows.out_rows
            out[: len(taken)] = x[taken]

        return [take_rows]


def _form(format_name: str) -> object:
    """What weights must have in common to stand in one matrix."""
    return "float" if format_name in FLOAT_FORMATS else RECIPES[format_name].form


def _stacked_bias(parts: Sequence[tuple[PlanTensor, np.ndarray]]) -> np.ndarray:
    if not any(bias.size for _, bias in parts):
        return _NO_WEIGHT
    return np.concatenate([b if b.size else np.zeros(t.shape[0], np.float32) for t, b in parts])
