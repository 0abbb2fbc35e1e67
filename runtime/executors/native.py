"""The C executor: one call per step.

Owns: handing over plan, weights and steps, the errors that come back.
Must not know: models, scheduler, where the library is (native_library.py), or how C computes an op.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...quant.codebooks import MAGNITUDES as CODEBOOKS
from ...quant.codebooks import packed_codebook
from ...quant.file_map import map_under
from ...quant.formats import FORMATS
from ..errors import FileFormatError, ModelError
from ..estimate import matrices
from ..machine import choose_threads
from ..ops import KvType
from ..plan import Plan, PlanTensor
from ..shared_weights import SharedWeights
from ..step import MOST_GUESSES, Step, check_adapters, check_given
from ..weights import WeightSource, finite_values, not_finite
from .file_maps import FileMaps
from .native_draw import NativeDrawer
from .native_library import Library

STEP_ARRAYS = (
    *("tokens", "positions", "seq_start", "block_table", "window_table", "out_rows"),
    *("hidden_rows", "states", "segments", "guesses", "replays"),
)
_F64 = 28  # MT_F64 of martlet.h


class NativeExecutor:
    name = "native"

    def __init__(
        self,
        plan: Plan,
        weights: WeightSource,
        *,
        block_tokens: int = 32,
        n_blocks: int,
        kv_type: KvType = KvType.F16,
        n_threads: int | None = None,
        isa: str | None = None,
        n_window_blocks: int | None = None,
        n_states: int = 1,
        n_guesses: int = MOST_GUESSES,
        mmap_experts: bool = False,
        repack: bool = True,
        shared: SharedWeights | None = None,
    ) -> None:
        """mmap_experts: weights of experts stay in the mapped file until a row first chooses them,
        and take memory from then on. repack: keep a copy of matrices as products read them; without
        it, each tile is laid out anew whenever it is used, and results are the same bits. shared:
        where other processes find that copy, or this one does; closed with the executor."""
        self.max_rows = plan.max_rows
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self.n_window_blocks = n_window_blocks or n_blocks
        self.window = plan.window
        self.sees_ahead = plan.sees_ahead
        self.n_states, self.n_guesses = n_states if plan.states else 0, n_guesses
        self._logits_width = plan.vocab_size
        self.hidden = np.empty((0, plan.hidden_width), np.float32)
        self._n_ops, self._n_adapters = len(plan.ops), plan.n_adapters
        self._given_width = plan.given_width
        self._widths = [buffer.width for buffer in plan.buffers]
        self._library = Library()
        self._ffi, self._lib = self._library.ffi, self._library.lib
        self.isa_index = self._library.isa_index(isa)
        self.drawer = NativeDrawer(self._ffi, self._lib, self.isa_index)
        self.n_threads = n_threads or choose_threads().count
        sizes = (self.n_threads, self.isa_index, block_tokens, n_blocks, int(kv_type))
        slots = (self.n_window_blocks, self.n_states, n_guesses)
        options = self._ffi.new("mt_options *", (*sizes, *slots))
        self._error = self._ffi.new("char[]", self._lib.MT_ERR_BYTES)
        self._stays: list[Any] = []  # what C reads for as long as it lives
        late = plan.experts_alone() if mmap_experts and repack else frozenset()
        self._maps = FileMaps(self._ffi, self._lib)
        plan_c, keep = self._plan(plan, weights, late, repack)
        self.repack = repack
        self._names = [(tensor.name, tensor.shape) for tensor in plan.tensors]
        bad = self._ffi.new("mt_bad_value *")
        self._shared = shared
        self._engine = self._create(plan_c, options, bad)
        del keep  # C has copied or repacked everything
        self._maps.loaded()
        if not self._engine and bad.tensor >= 0:
            raise self._not_finite(bad)
        if not self._engine:
            raise ModelError(self._message())
        info = self._ffi.new("mt_info *")
        self._lib.mt_engine_info(self._engine, info)
        self.weight_bytes, self.late_bytes = info.weight_bytes, info.late_bytes
        self.kv_bytes = info.kv_bytes
        self.state_bytes, self.guess_bytes = info.state_bytes, info.guess_bytes
        self.arena_bytes = info.arena_bytes

    @staticmethod
    def why_slow() -> str | None:
        """Why another executor is the better choice on this machine, or None."""
        if Library().best_isa() == "scalar":
            return "no vector kernels for this CPU"
        return None

    def _create(self, plan_c: Any, options: Any, bad: Any) -> Any:
        if self._shared is None:
            return self._lib.mt_engine_create(plan_c, options, bad, self._error)
        memory, is_packed = self._shared.open()
        self._stays.append(memory)
        at = self._ffi.cast("uint8_t *", memory.ctypes.data)
        create = self._lib.mt_engine_create_over
        engine = create(plan_c, options, at, memory.nbytes, is_packed, bad, self._error)
        if not engine:
            self._shared.close()
        elif not is_packed:
            self._shared.publish()
        return engine

    @property
    def isa(self) -> str:
        return list(self._library.isas())[self.isa_index][0]

    def run(self, step: Step) -> np.ndarray:
        _check_lengths(step)
        check_adapters(step, self._n_adapters)
        check_given(step, self._given_width)
        logits = np.empty((len(step.out_rows), self._logits_width), np.float32)
        record = self._ffi.new("mt_step *")
        record.n_rows, record.n_out = len(step.tokens), len(step.out_rows)
        record.n_hidden = len(step.hidden_rows)
        record.n_seqs, record.table_width = step.block_table.shape
        for field in STEP_ARRAYS:
            setattr(record, field, self._ints(getattr(step, field)))
        adapters = np.ascontiguousarray(step.adapters, np.float32)
        record.adapters = self._ffi.from_buffer("float[]", adapters)
        given = np.ascontiguousarray(step.given, np.float32)
        record.given = self._ffi.from_buffer("float[]", given)
        record.logits = self._ffi.from_buffer("float[]", logits)
        hidden = np.empty((record.n_hidden, self.hidden.shape[1]), np.float32)
        record.hidden = self._ffi.from_buffer("float[]", hidden)
        status = self._lib.mt_engine_run(self._live(), record, self._error)
        if status:
            bad = self._ffi.new("mt_bad_value *")
            self._lib.mt_engine_bad(self._engine, bad)
            if bad.tensor >= 0:
                raise self._not_finite(bad)
        self._maps.check()
        self._check(status)
        self.hidden = hidden
        return logits

    def read_rows(self, buffer: int, n_rows: int) -> np.ndarray:
        """Rows of a float buffer after a step, (n_rows, width) float32; the plan must keep it."""
        out = np.empty((n_rows, self._widths[buffer]), np.float32)
        pointer = self._ffi.from_buffer("float[]", out)
        read = self._lib.mt_engine_read_rows
        self._check(read(self._live(), buffer, n_rows, pointer, self._error))
        return out

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        """window: the same in windowed layers, where other blocks hold those tokens."""
        from_window, to_window = window or (src, dst)
        blocks = (src, from_window), (dst, to_window)
        self._check(self._lib.mt_engine_copy_block(self._live(), *blocks, self._error))

    def copy_state(self, src: int, dst: int) -> None:
        self._check(self._lib.mt_engine_copy_state(self._live(), src, dst, self._error))

    def read_block(self, block: int, window_block: int | None = None) -> bytes:
        """Keys and values of one block in all layers, in this build's own layout."""
        data = self._ffi.new("uint8_t[]", self._lib.mt_engine_block_bytes(self._live()))
        where = (block, block if window_block is None else window_block)
        self._check(self._lib.mt_engine_read_block(self._live(), where, data, self._error))
        return bytes(self._ffi.buffer(data))

    def write_block(self, block: int, data: bytes, window_block: int | None = None) -> None:
        """Puts back what read_block gave on the same build, plan and cache type."""
        expected = self._lib.mt_engine_block_bytes(self._live())
        if len(data) != expected:
            raise ModelError(f"a block has {expected} bytes, not {len(data)}")
        pointer = self._ffi.from_buffer("uint8_t[]", data)
        where = (block, block if window_block is None else window_block)
        self._check(self._lib.mt_engine_write_block(self._live(), where, pointer, self._error))

    def trace_ops(self) -> np.ndarray:
        """Has every step from now on note when each thread worked on each op of the plan. What it
        returns is written over by each: int64 (n_threads, n_ops, 2), starts and ends by
        time.monotonic_ns."""
        self._spans = np.zeros((self.n_threads, self._n_ops, 2), np.int64)
        pointer = self._ffi.cast("mt_op_span *", self._spans.ctypes.data)
        self._lib.mt_engine_trace(self._live(), pointer)
        return self._spans

    def slow_down(self, thread: int, times: float) -> None:
        """From now on this thread idles after its work, `times` as long as that took: for
        measurements of what unequal cores do."""
        self._check(self._lib.mt_engine_slow_down(self._live(), thread, times, self._error))

    def close(self) -> None:
        if self._engine:
            self._lib.mt_engine_free(self._engine)
            self._maps.close()
            self._stays.clear()
            if self._shared:
                self._shared.close()
            self._engine = None

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()

    # -- handing over -----------------------------------------------------------------------

    def _plan(
        self, plan: Plan, weights: WeightSource, late: frozenset[int], repack: bool = True
    ) -> tuple[Any, list[Any]]:
        """The mt_plan, and what must stay alive while C reads it. late: tensors to be packed when
        they are first used, if they are in a mapped file; repack: whether others are packed."""
        new, cast = self._ffi.new, self._ffi.from_buffer
        ops, buffers, kv_layers = plan.op_records(), plan.buffer_records(), plan.kv_records()
        states, inputs = (np.array(n, np.int32) for n in (plan.states, plan.inputs))
        tensors = new("mt_tensor[]", len(plan.tensors))
        in_file = frozenset() if repack else matrices(plan)
        keep: list[Any] = [ops, buffers, kv_layers, states, inputs, tensors]
        for at, (record, tensor) in enumerate(zip(tensors, plan.tensors, strict=True)):
            if tensor.values is None:
                self._maps.watch(weights.data(tensor.name))
            fmt, values = _tensor_bytes(tensor, weights)
            data = cast(values)
            record.format, record.n_bytes, record.data = fmt, values.nbytes, data
            record.flags = self._lib.MT_TENSOR_MAPPED if map_under(values) is not None else 0
            lib = self._lib
            if tensor.stays:
                record.flags = lib.MT_TENSOR_STAYS
            elif at in late and record.flags:
                record.flags |= lib.MT_TENSOR_LATE
            elif at in in_file:
                record.flags |= lib.MT_TENSOR_RAW
            outlives = record.flags & ~lib.MT_TENSOR_MAPPED
            if outlives:
                self._stays += [values, data]
                self._maps.watch(values, stays=True)
            record.rows = math.prod(tensor.shape[:-1])
            record.cols = tensor.shape[-1]
            keep += [values, data]
            if tensor.format in CODEBOOKS and tensor.values is None:
                record.codebook = cast("uint16_t[]", packed_codebook(tensor.format))
                keep.append(record.codebook)
                if outlives:
                    self._stays.append(record.codebook)
        record = new("mt_plan *")
        record.n_ops, record.n_buffers = len(plan.ops), len(plan.buffers)
        record.n_tensors, record.n_kv_layers = len(plan.tensors), len(plan.kv_layers)
        record.max_rows, record.arena_bytes = plan.max_rows, plan.arena_bytes
        record.hidden, record.n_states = plan.hidden, len(states)
        record.n_adapters, record.given = plan.n_adapters, plan.given_width
        record.states, record.inputs = cast("int32_t[]", states), cast("int32_t[]", inputs)
        record.ops = cast("mt_op[]", ops)
        record.buffers = cast("mt_buffer[]", buffers)
        record.kv_layers = cast("mt_kv_layer[]", kv_layers)
        record.tensors = tensors
        return record, keep

    def _not_finite(self, bad: Any) -> FileFormatError:
        name, shape = self._names[bad.tensor]
        return not_finite(name, (*np.unravel_index(bad.row, shape[:-1]), bad.col))

    def _ints(self, values: np.ndarray) -> Any:
        """A pointer into an int32 array; the step keeps the array alive during the call."""
        if values.dtype != np.int32 or not values.flags.c_contiguous:
            raise ModelError(f"step arrays are contiguous int32, not {values.dtype}")
        return self._ffi.cast("int32_t *", values.ctypes.data)

    def _live(self) -> Any:
        if not self._engine:
            raise ModelError("the executor is closed")
        return self._engine

    def _check(self, status: int) -> None:
        if status:
            raise ModelError(self._message())

    def _message(self) -> str:
        return self._ffi.string(self._error).decode(errors="replace")


def _check_lengths(step: Step) -> None:
    """C sees pointers and three counts; that all arrays have those lengths is checked here."""
    if step.block_table.ndim != 2:
        raise ModelError(f"the block table has {step.block_table.ndim} dimensions, expected 2")
    n_rows, n_seqs = len(step.tokens), len(step.block_table)
    if step.window_table.shape != step.block_table.shape:
        raise ModelError(
            f"the window table has shape {step.window_table.shape}, not {step.block_table.shape}"
        )
    if len(step.positions) != n_rows:
        raise ModelError(f"the step has {n_rows} tokens, but {len(step.positions)} positions")
    if len(step.segments) != n_rows:
        raise ModelError(f"the step has {n_rows} tokens, but {len(step.segments)} segments")
    for name in ("states", "guesses", "replays"):
        if (n_found := len(getattr(step, name))) != n_seqs:
            raise ModelError(f"the step has {n_seqs} sequences, but {n_found} {name}")
    if len(step.seq_start) != n_seqs + 1:
        raise ModelError(f"the step has {n_seqs} block tables, but {len(step.seq_start)} starts")


def _tensor_bytes(tensor: PlanTensor, weights: WeightSource) -> tuple[int, np.ndarray]:
    """C's format id and the bytes: matrices as they stand in the file, vectors as float32."""
    if tensor.values is not None:
        return _F64, np.ascontiguousarray(tensor.values, np.float64)
    if len(tensor.shape) == 1:
        return FORMATS["F32"].ggml_type, np.ascontiguousarray(
            finite_values(weights, tensor.name).reshape(-1)
        )
    return FORMATS[tensor.format].ggml_type, weights.data(tensor.name)
