"""Binds each op of a plan to its numba kernel and to the arrays that the kernel reads and writes.

Owns: packed weights, and which kernel an op calls with what. Must not know: models, schedulers,
threads, or the arithmetic inside kernels. Called once, at load, by numba_executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from ..ops import OpKind, RopeStyle, RowKind
from ..plan import FLOAT_FORMATS, Op, Plan, PlanTensor
from ..weights import WeightSource, decoded_rows, finite_values
from .numba_attention import attention
from .numba_bind_experts import bind_expert_glu, bind_expert_sum, bind_router
from .numba_bind_heads import bind_head_linear
from .numba_bind_state import bind_conv, bind_delta, bind_scan
from .numba_math import Q8Views
from .numba_matmul import linear_float, linear_quantized
from .numba_memory import NO_FLOATS, NO_Q8, Call, Memory, Rows
from .numba_rope import HeadOrder, HeadShape, rope_kv, rope_table
from .numba_rowops import (
    add_gated,
    embed_float,
    embed_quantized,
    glu,
    norm,
    quantize_rows,
    scale_rows,
)
from .numba_state import gate_rows
from .numba_weights import (
    FloatMatrix,
    QuantizedMatrix,
    aligned,
    form_of,
    pack_floats,
    pack_quantized,
)

_NO_WEIGHT = np.empty(0, np.float32)


class Binder:
    def __init__(self, plan: Plan, weights: WeightSource, memory: Memory, n_threads: int) -> None:
        self.plan = plan
        self._weights = weights
        self.memory = memory
        self._n_threads = n_threads
        self._packed: dict[tuple[str, ...], QuantizedMatrix | FloatMatrix] = {}

    def calls(self) -> list[Call]:
        """The calls that are one step, in order."""
        bind = self._binders()
        return [call for op in self.plan.ops for call in bind[op.kind](op)]

    def pack(self, names: tuple[str, ...]) -> QuantizedMatrix | FloatMatrix:
        if names not in self._packed:
            is_float = self._weights.format_name(names[0]) in FLOAT_FORMATS
            self._packed[names] = (
                pack_floats(names, self._weights)
                if is_float
                else pack_quantized(names, self._weights, self._n_threads)
            )
        return self._packed[names]

    def vector(self, tensor: int) -> np.ndarray:
        """A tensor of one dimension as floats (float64 for tables), empty where there is none."""
        if tensor < 0:
            return _NO_WEIGHT
        found = self.plan.tensors[tensor]
        if found.values is not None:
            return found.values
        return finite_values(self._weights, found.name).reshape(-1)

    def floats(self, buffer: int) -> np.ndarray:
        return self.memory.floats[buffer] if buffer >= 0 else NO_FLOATS

    def q8(self, buffer: int) -> Q8Views:
        return self.memory.q8[buffer] if buffer >= 0 else NO_Q8

    def sink(self, op: Op) -> tuple[np.ndarray, Q8Views, Q8Views]:
        """The op's output as floats, or quantized and what that leaves over; the others empty."""
        return self.floats(op.out), self.q8(op.out), self.q8(op.out_rest)

    def rows_of(self, op: Op) -> RowKind:
        return self.plan.buffers[op.out].rows

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
            OpKind.COPY: self._copy,
            OpKind.LINEAR_GLU: self._linear_glu,
            OpKind.SCALE: self._scale,
            OpKind.GATE: self._gate,
            OpKind.CONV: partial(bind_conv, self),
            OpKind.DELTA: partial(bind_delta, self),
            OpKind.SCAN: partial(bind_scan, self),
            OpKind.ROUTER: partial(bind_router, self),
            OpKind.EXPERT_GLU: partial(bind_expert_glu, self),
            OpKind.EXPERT_SUM: partial(bind_expert_sum, self),
            OpKind.HEAD_LINEAR: partial(bind_head_linear, self),
            OpKind.ADAPT: self._adapt,
        }

    def _embed(self, op: Op) -> list[Call]:
        tensor = self.plan.tensors[op.weight_of("table")]
        scale, out, adds = np.float32(op.float_of("scale")), self.floats(op.out), op.accumulate
        by = attrgetter(("tokens", "positions", "segments")[op.int_of("by")])
        if tensor.stays:
            return [lambda rows: self._embed_stored(tensor.name, by(rows), scale, out, adds)]
        table = self.pack((tensor.name,))
        if isinstance(table, QuantizedMatrix):
            quantized = table  # the type of a captured variable is not narrowed
            return [lambda rows: embed_quantized(quantized, by(rows), scale, out, adds)]
        floats = table
        return [lambda rows: embed_float(floats, by(rows), scale, out, adds)]

    def _embed_stored(
        self, name: str, ids: np.ndarray, scale: np.float32, out: np.ndarray, adds: bool
    ) -> None:
        before = out[: len(ids)] if adds else np.float32(0)
        out[: len(ids)] = before + scale * decoded_rows(self._weights, name, ids)

    def _norm(self, op: Op) -> list[Call]:
        x, weight = self.floats(op.inputs[0]), self.vector(op.weight_of("weight"))
        bias, centered = self.vector(op.weight_of("bias")), bool(op.int_of("centered"))
        group, eps, adds = op.int_of("group"), np.float32(op.float_of("eps")), op.accumulate
        (out, q8, rest), kind = self.sink(op), self.rows_of(op)
        return [
            lambda rows: norm(
                x, weight, bias, group, centered, eps, out, adds, q8, rest, rows.counts[kind]
            )
        ]

    def _quantize(self, op: Op) -> list[Call]:
        x, kind, (_, q8, rest) = self.floats(op.inputs[0]), self.rows_of(op), self.sink(op)
        return [lambda rows: quantize_rows(x, q8, rest, rows.counts[kind])]

    def _linear(self, op: Op) -> list[Call]:
        # The logits are another array in every step, so `out` is looked up then.
        floats, out, col = self.memory.floats, op.out, op.int_of("out_col")
        return self._products(op, 3, lambda: floats[out], col)

    def _linear_glu(self, op: Op) -> list[Call]:
        width, alone = self.plan.buffers[op.out].width, op.weight_of("up") < 0
        gate_up = aligned((self.plan.max_rows, (2 - alone) * width), np.float32)
        products = self._products(op, 2, lambda: gate_up, 0)
        return [*products, self._glu_call(op, gate_up, alone)]

    def _products(
        self, op: Op, n_weights: int, out: Callable[[], np.ndarray], col: int
    ) -> list[Call]:
        """The op's weights times its rows: one call for each run of weights of one form."""
        pairs = zip(op.weights[:n_weights], op.weights[n_weights:], strict=True)
        segments = [(self.plan.tensors[w], self.vector(b)) for w, b in pairs if w >= 0]
        calls = []
        for _, run in groupby(segments, lambda segment: _form(segment[0].format)):
            parts = list(run)
            matrix = self.pack(tuple(tensor.name for tensor, _ in parts))
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
        adds, kind = op.accumulate, self.rows_of(op)
        if isinstance(w, QuantizedMatrix):
            q8, rest = self.q8(op.inputs[0]), self.q8(op.inputs[1])
            return lambda rows: linear_quantized(
                w, bias, q8, rest, rows.counts[kind], out(), col, adds
            )
        x = self.floats(op.inputs[0])
        return lambda rows: linear_float(w, bias, x, rows.counts[kind], out(), col, adds)

    def _adapt(self, op: Op) -> list[Call]:
        floats, out = self.memory.floats, op.out
        x, low = map(self.floats, op.inputs)
        a, b = (self.pack((self.plan.tensors[w].name,)) for w in op.weights)
        assert isinstance(a, FloatMatrix)
        assert isinstance(b, FloatMatrix)
        kind, (col, adapter) = self.rows_of(op), op.ints
        scale = np.float32(op.float_of("scale"))

        def adapt(rows: Rows) -> None:
            taken = {RowKind.OUT: rows.out_rows, RowKind.HIDDEN: rows.hidden_rows}
            seqs = rows.row_seq[taken[kind]] if kind in taken else rows.row_seq
            shares = rows.adapters[seqs, adapter]
            at = np.flatnonzero(shares)
            if not len(at):
                return
            linear_float(a, _NO_WEIGHT, x[at], len(at), low, 0, False)
            low[: len(at)] *= (scale * shares[at])[:, None]
            y = np.empty((len(at), b.n_rows), np.float32)
            linear_float(b, _NO_WEIGHT, low, len(at), y, 0, False)
            floats[out][at, col : col + b.n_rows] += y

        return [adapt]

    def _rope_table(self, op: Op) -> list[Call]:
        inv_freq, out = self.vector(op.weight_of("inv_freq")), self.floats(op.out)
        factor = op.float_of("factor")
        return [lambda rows: rope_table(rows.positions, inv_freq, factor, out)]

    def _head_shape(self, op: Op) -> HeadShape:
        heads, kv_heads, head_dim, value_dim = op.ints[:4]
        is_latent = self.plan.kv_layers[op.int_of("kv_layer")].is_latent
        return HeadShape(heads, kv_heads, head_dim, value_dim, is_latent)

    def _rope_kv(self, op: Op) -> list[Call]:
        qkv, trig = self.floats(op.out), self.floats(op.inputs[1])
        q_norm, k_norm = self.vector(op.weight_of("q_norm")), self.vector(op.weight_of("k_norm"))
        shape, eps = self._head_shape(op), np.float32(op.float_of("eps"))
        n_rot, is_half = op.int_of("n_rot"), op.int_of("style") == RopeStyle.HALF
        temperature = float(np.float32(op.float_of("temperature")))
        is_after, v_norm = bool(op.int_of("norm_after")), bool(op.int_of("v_norm"))
        order = HeadOrder(is_after, temperature, op.int_of("temperature_span"), v_norm)
        keys, values, block_tokens = self.memory.layer(op.int_of("kv_layer"))
        group = int(self.memory.is_windowed[op.int_of("kv_layer")])
        return [
            lambda rows: rope_kv(
                qkv, trig, q_norm, k_norm, eps, shape, n_rot, is_half, order, rows.positions,
                rows.slots[group], keys, values, block_tokens,
            )
        ]  # fmt: skip

    def _attention(self, op: Op) -> list[Call]:
        x, (out, q8, rest) = self.floats(op.inputs[0]), self.sink(op)
        shape, scale = self._head_shape(op), np.float32(op.float_of("scale"))
        window, cap, n_threads = op.int_of("window"), op.float_of("cap"), self._n_threads
        cap, both_ways = np.float32(cap), bool(op.int_of("both_ways"))
        keys, values, block_tokens = self.memory.layer(op.int_of("kv_layer"))
        group = int(self.memory.is_windowed[op.int_of("kv_layer")])
        sinks = self.vector(op.weight_of("sinks"))
        return [
            lambda rows: attention(
                x, shape, keys, values, block_tokens, scale, cap, sinks, window, both_ways,
                rows.tables[group], rows.row_seq, rows.positions, rows.lengths, out, q8, rest,
                n_threads,
            )
        ]  # fmt: skip

    def _glu(self, op: Op) -> list[Call]:
        return [self._glu_call(op, self.floats(op.inputs[0]), bool(op.int_of("alone")))]

    def _glu_call(self, op: Op, gate_up: np.ndarray, alone: bool) -> Call:
        activation, kind, (out, q8, rest) = (
            op.int_of("activation"), self.rows_of(op), self.sink(op)
        )  # fmt: skip
        return lambda rows: glu(gate_up, activation, alone, out, q8, rest, rows.counts[kind])

    def _gate(self, op: Op) -> list[Call]:
        x, gate, (out, q8, rest) = *map(self.floats, op.inputs), self.sink(op)
        *cols, activation = op.ints
        runs: Any = tuple(cols)
        width, kind = self.plan.buffers[op.out].width, self.rows_of(op)
        return [
            lambda rows: gate_rows(
                x, gate, runs, activation, out, q8, rest, width, rows.counts[kind]
            )
        ]  # fmt: skip

    def _add(self, op: Op) -> list[Call]:
        x, out, kind = self.floats(op.inputs[0]), self.floats(op.out), self.rows_of(op)
        by, gate = self.floats(op.inputs[1]), self.vector(op.weight_of("gate"))

        def add(rows: Rows) -> None:
            n = rows.counts[kind]
            if gate.size:
                add_gated(x, by, gate, out, n)
            else:
                out[:n] += x[:n]

        return [add]

    def _scale(self, op: Op) -> list[Call]:
        floats, out, kind = self.memory.floats, op.out, self.rows_of(op)
        scale, cap = np.float32(op.float_of("scale")), np.float32(op.float_of("cap"))
        return [lambda rows: scale_rows(floats[out], scale, cap, rows.counts[kind])]

    def _take_rows(self, op: Op) -> list[Call]:
        x, out = self.floats(op.inputs[0]), self.floats(op.out)

        is_hidden = self.rows_of(op) is RowKind.HIDDEN

        def take_rows(rows: Rows) -> None:
            taken = rows.hidden_rows if is_hidden else rows.out_rows
            out[: len(taken)] = x[taken]

        return [take_rows]

    def _copy(self, op: Op) -> list[Call]:
        x, out, at = op.inputs[0], self.floats(op.out), op.int_of("out_col")
        width, kind = self.plan.buffers[op.out if x < 0 else x].width, self.rows_of(op)
        floats = self.floats(x)

        def copy(rows: Rows) -> None:
            n = rows.counts[kind]
            out[:n, at : at + width] = rows.given if x < 0 else floats[:n, :width]

        return [copy]


def _form(format_name: str) -> object:
    """What weights must have in common to stand in one matrix."""
    return "float" if format_name in FLOAT_FORMATS else form_of(format_name)


def _stacked_bias(parts: Sequence[tuple[PlanTensor, np.ndarray]]) -> np.ndarray:
    if not any(bias.size for _, bias in parts):
        return _NO_WEIGHT
    return np.concatenate([b if b.size else np.zeros(t.shape[0], np.float32) for t, b in parts])
