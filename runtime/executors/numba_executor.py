"""Runs a plan with numba kernels: for machines where the native library is absent.

Owns: packed weights, the arena, the KV pool, and which kernel each op calls with what. Must not
know: models, schedulers, or the arithmetic inside kernels. Everything is bound to arrays once, at
load; then one step is a list of calls. Loading also compiles what the plan needs (`warm_up_ms`);
numba keeps the machine code on disk, so the next process loads it in a fraction of the time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numba
import numpy as np

from ..errors import ModelError
from ..ops import BufferKind, KvType, OpKind, RopeStyle, RowKind
from ..plan import FLOAT_FORMATS, Op, Plan
from ..step import Step
from ..weights import WeightSource
from .numba_attention import attention
from .numba_matmul import linear_float, linear_quantized
from .numba_rowops import (
    HeadShape,
    Q8Views,
    embed_float,
    embed_quantized,
    glu,
    norm,
    quantize_rows,
    rope_kv,
    rope_table,
)
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
_SPINS = "GOMP_SPINCOUNT"
_SPIN_SETTINGS = {_SPINS, "OMP_WAIT_POLICY"}  # with either, the user has decided
# One of numba's threading layers ends the process when two threads start parallel kernels.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class _Rows:
    """A step's arrays as the kernels want them."""

    tokens: np.ndarray  # (n_rows) int32
    positions: np.ndarray  # (n_rows) int32
    row_seq: np.ndarray  # (n_rows) int32 index into block_table
    slots: np.ndarray  # (n_rows) int32
    block_table: np.ndarray  # (n_seqs, table_width) int32
    out_rows: np.ndarray  # (n_out) int32
    counts: dict[RowKind, int]

    @classmethod
    def of(cls, step: Step, block_tokens: int) -> _Rows:
        # Copies, because numba compiles every kernel again for a read-only array.
        tokens, positions, table, out_rows = (
            np.array(a, np.int32, order="C")
            for a in (step.tokens, step.positions, step.block_table, step.out_rows)
        )
        row_seq = np.repeat(np.arange(step.n_seqs, dtype=np.int32), np.diff(step.seq_start))
        blocks = table[row_seq, positions // block_tokens]
        slots = blocks * np.int32(block_tokens) + positions % np.int32(block_tokens)
        counts = {RowKind.ALL: len(tokens), RowKind.OUT: len(out_rows)}
        return cls(tokens, positions, row_seq, slots, table, out_rows, counts)


_Call = Callable[[_Rows], None]


def _start_threads() -> None:
    """Starts numba's threads, so that they wait briefly for work and then sleep.

    GNU OpenMP by default spins for milliseconds, which starves the very thread it waits for when
    another program has a core; it reads its environment once, when numba first loads it.
    """
    if _SPIN_SETTINGS & os.environ.keys():
        return
    os.environ[_SPINS] = "2000"  # about 0.1 ms
    try:
        numba.get_num_threads()
    finally:
        del os.environ[_SPINS]


class NumbaExecutor:
    name = "numba"

    def __init__(
        self,
        plan: Plan,
        weights: WeightSource,
        *,
        block_tokens: int = 32,
        n_blocks: int,
        kv_type: KvType = KvType.F16,
        n_threads: int | None = None,
    ) -> None:
        if block_tokens % LANES:
            raise ModelError(f"blocks of {block_tokens} tokens; use a multiple of {LANES}")
        _start_threads()
        most = self.most_threads()
        if n_threads is not None and not 1 <= n_threads <= most:
            raise ModelError(f"{n_threads} threads; use 1 to {most}, or set NUMBA_NUM_THREADS")
        self.n_threads = n_threads or most
        self.max_rows = plan.max_rows
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self._plan = plan
        self._weights = weights
        self._packed: dict[tuple[str, ...], QuantizedMatrix | FloatMatrix] = {}
        dtype, n_slots = _KV_DTYPES[kv_type], n_blocks * block_tokens
        self._keys = [np.zeros(n_slots * k.kv_heads * k.head_dim, dtype) for k in plan.kv_layers]
        self._values = [
            np.zeros(n_slots * k.kv_heads * (-(-k.value_dim // LANES) * LANES), dtype)
            for k in plan.kv_layers
        ]
        self._place_buffers()
        bind = self._binders()
        self._calls: list[_Call] = [call for op in plan.ops for call in bind[op.kind](op)]
        self.warm_up_ms = self._warm_up()
        """Milliseconds that loading spent on compiling kernels, or on reading compiled ones."""

    @staticmethod
    def most_threads() -> int:
        """Threads that numba started with: one per core, or NUMBA_NUM_THREADS."""
        return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]

    def run(self, step: Step) -> np.ndarray:
        if step.n_rows > self.max_rows:
            raise ModelError(f"a step of {step.n_rows} rows, at most {self.max_rows}")
        logits = np.empty((step.n_out, self._plan.vocab_size), np.float32)
        with _ONE_AT_A_TIME:
            self._floats[self._logits] = logits
            numba.set_num_threads(self.n_threads)  # holds for the calling thread only
            rows = _Rows.of(step, self.block_tokens)
            for call in self._calls:
                call(rows)
        return logits

    def copy_block(self, src: int, dst: int) -> None:
        for pool in (*self._keys, *self._values):
            blocks = pool.reshape(self.n_blocks, -1)
            blocks[dst] = blocks[src]

    def close(self) -> None:
        self._calls.clear()
        self._packed.clear()

    # -- load -------------------------------------------------------------------------------

    def _place_buffers(self) -> None:
        """Views of the arena by buffer id; the logits get their array in every step."""
        arena = aligned((self._plan.arena_bytes,), np.uint8)
        self._floats = [_NO_FLOATS] * len(self._plan.buffers)
        self._q8 = [_NO_Q8] * len(self._plan.buffers)
        for i, b in enumerate(self._plan.buffers):
            if b.is_logits:
                self._logits = i
            elif b.offset >= 0:
                rows = arena[b.offset : b.offset + b.row_bytes * self.max_rows]
                rows = rows.reshape(self.max_rows, b.row_bytes)
                if b.kind is BufferKind.Q8:
                    self._q8[i] = Q8Views(
                        rows.view(np.int8), rows.view(np.int32), rows.view(np.float32)
                    )
                else:
                    self._floats[i] = rows.view(np.float32)

    def _warm_up(self) -> float:
        start = time.perf_counter()
        one, none = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        self.run(Step(one, one, np.array([0, 1], np.int32), none, one))
        return (time.perf_counter() - start) * 1e3

    def _pack(self, names: tuple[str, ...]) -> QuantizedMatrix | FloatMatrix:
        if names not in self._packed:
            is_float = self._weights.format_name(names[0]) in FLOAT_FORMATS
            self._packed[names] = (
                pack_floats(names, self._weights)
                if is_float
                else pack_quantized(names, self._weights, self.n_threads)
            )
        return self._packed[names]

    def _vector(self, tensor: int) -> np.ndarray:
        """A tensor of one dimension as floats (float64 for tables), empty where there is none."""
        if tensor < 0:
            return _NO_WEIGHT
        values = self._plan.tensors[tensor].values
        return (
            self._weights.dequantized(self._plan.tensors[tensor].name) if values is None else values
        )

    # -- ops: each binder returns the calls that do the op ------------------------------------

    def _binders(self) -> dict[OpKind, Callable[[Op], list[_Call]]]:
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
        }

    def _row_kind(self, op: Op) -> RowKind:
        return self._plan.buffers[op.out].rows

    def _embed(self, op: Op) -> list[_Call]:
        table = self._pack((self._plan.tensors[op.weight_of("table")].name,))
        scale, out = np.float32(op.float_of("scale")), self._floats[op.out]
        if isinstance(table, QuantizedMatrix):
            quantized = table  # the type of a captured variable is not narrowed
            return [lambda rows: embed_quantized(quantized, rows.tokens, scale, out)]
        floats = table
        return [lambda rows: embed_float(floats, rows.tokens, scale, out)]

    def _norm(self, op: Op) -> list[_Call]:
        x, weight = self._floats[op.inputs[0]], self._vector(op.weight_of("weight"))
        group, eps = op.int_of("group"), np.float32(op.float_of("eps"))
        out, q8, adds, kind = (
            self._floats[op.out],
            self._q8[op.out],
            op.accumulate,
            self._row_kind(op),
        )
        return [lambda rows: norm(x, weight, group, eps, out, adds, q8, rows.counts[kind])]

    def _quantize(self, op: Op) -> list[_Call]:
        x, q8, kind = self._floats[op.inputs[0]], self._q8[op.out], self._row_kind(op)
        return [lambda rows: quantize_rows(x, q8, rows.counts[kind])]

    def _linear(self, op: Op) -> list[_Call]:
        """One call for each run of neighbouring weights of one form."""
        tensors = self._plan.tensors
        segments = [
            (tensors[w], self._vector(b))
            for w, b in zip(op.weights[:3], op.weights[3:], strict=True)
            if w >= 0
        ]
        calls, col = [], op.int_of("out_col")
        for _, run in groupby(segments, lambda segment: self._form(segment[0].format)):
            parts = list(run)
            names, n_rows = tuple(t.name for t, _ in parts), sum(t.shape[0] for t, _ in parts)
            bias = _NO_WEIGHT
            if any(b.size for _, b in parts):
                bias = np.concatenate(
                    [b if b.size else np.zeros(t.shape[0], np.float32) for t, b in parts]
                )
            calls.append(self._linear_call(op, self._pack(names), bias, col))
            col += n_rows
        return calls

    def _form(self, format_name: str) -> object:
        return "float" if format_name in FLOAT_FORMATS else RECIPES[format_name].form

    def _linear_call(
        self, op: Op, w: QuantizedMatrix | FloatMatrix, bias: np.ndarray, col: int
    ) -> _Call:
        floats, out, adds, kind = self._floats, op.out, op.accumulate, self._row_kind(op)
        if isinstance(w, QuantizedMatrix):
            _, words, d = self._q8[op.inputs[0]]
            return lambda rows: linear_quantized(
                w, bias, words, d, rows.counts[kind], floats[out], col, adds
            )
        x = floats[op.inputs[0]]
        return lambda rows: linear_float(w, bias, x, rows.counts[kind], floats[out], col, adds)

    def _rope_table(self, op: Op) -> list[_Call]:
        inv_freq, out = self._vector(op.weight_of("inv_freq")), self._floats[op.out]
        factor = op.float_of("factor")
        return [lambda rows: rope_table(rows.positions, inv_freq, factor, out)]

    def _rope_kv(self, op: Op) -> list[_Call]:
        qkv, trig = self._floats[op.out], op.inputs[1]
        angles = self._floats[trig] if trig >= 0 else _NO_FLOATS
        q_norm, k_norm = self._vector(op.weight_of("q_norm")), self._vector(op.weight_of("k_norm"))
        shape, eps, n_rot = (
            HeadShape(*op.ints[:4]),
            np.float32(op.float_of("eps")),
            op.int_of("n_rot"),
        )
        is_half, layer = op.int_of("style") == RopeStyle.HALF, op.int_of("kv_layer")
        keys, values, block_tokens = self._keys[layer], self._values[layer], self.block_tokens
        return [
            lambda rows: rope_kv(
                qkv, angles, q_norm, k_norm, eps, shape, n_rot, is_half, rows.slots, keys, values,
                block_tokens,
            )
        ]  # fmt: skip

    def _attention(self, op: Op) -> list[_Call]:
        x, out, q8 = self._floats[op.inputs[0]], self._floats[op.out], self._q8[op.out]
        shape, scale, window = (
            HeadShape(*op.ints[:4]),
            np.float32(op.float_of("scale")),
            op.int_of("window"),
        )
        layer, block_tokens, n_threads = op.int_of("kv_layer"), self.block_tokens, self.n_threads
        keys, values = self._keys[layer], self._values[layer]
        return [
            lambda rows: attention(
                x, shape, keys, values, block_tokens, scale, window, rows.block_table,
                rows.row_seq, rows.positions, out, q8, n_threads,
            )
        ]  # fmt: skip

    def _glu(self, op: Op) -> list[_Call]:
        x, out, q8 = self._floats[op.inputs[0]], self._floats[op.out], self._q8[op.out]
        activation, kind = op.int_of("activation"), self._row_kind(op)
        return [lambda rows: glu(x, activation, out, q8, rows.counts[kind])]

    def _add(self, op: Op) -> list[_Call]:
        x, out, kind = self._floats[op.inputs[0]], self._floats[op.out], self._row_kind(op)

        def add(rows: _Rows) -> None:
            out[: rows.counts[kind]] += x[: rows.counts[kind]]

        return [add]

    def _take_rows(self, op: Op) -> list[_Call]:
        x, out = self._floats[op.inputs[0]], self._floats[op.out]

        def take_rows(rows: _Rows) -> None:
            out[: len(rows.out_rows)] = x[rows.out_rows]

        return [take_rows]
