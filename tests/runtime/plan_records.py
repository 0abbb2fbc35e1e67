"""The record arrays of a plan, free to be spoiled, and an engine made of them: for tests of what C
refuses. Goes around NativeExecutor, whose plans are always sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from martlet.runtime.executors.native import STEP_ARRAYS, NativeExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind
from martlet.runtime.plan import Plan
from martlet.runtime.weights import WeightSource

from .native_library import LIBRARY
from .tiny import Chunk, TinyDims, make_step, tiny_model

FFI, LIB = LIBRARY.ffi, LIBRARY.lib
MAX_ROWS, N_BLOCKS, BLOCK_TOKENS = 8, 20, 16
TENSOR_FIELDS = ("format", "flags", "rows", "cols", "n_bytes")


@dataclass
class Records:
    """C's view of one plan. Every array may be written; `data` are the tensors' true bytes."""

    ops: np.ndarray
    buffers: np.ndarray
    kv_layers: np.ndarray
    tensors: list[dict[str, int]]
    sizes: dict[str, int]
    options: dict[str, int]
    data: Sequence[np.ndarray]

    @classmethod
    def of(cls, plan: Plan, weights: WeightSource) -> Records:
        executor = NativeExecutor(plan, weights, n_blocks=N_BLOCKS, n_threads=1)
        try:
            record, keep = executor._plan(plan, weights, frozenset())
            tensors = [
                {name: getattr(record.tensors[i], name) for name in TENSOR_FIELDS}
                for i in range(record.n_tensors)
            ]
            arrays = [kept for kept in keep if isinstance(kept, np.ndarray)]
        finally:
            executor.close()
        return cls(
            plan.op_records(),
            plan.buffer_records(),
            plan.kv_records(),
            tensors,
            {
                "max_rows": plan.max_rows,
                "arena_bytes": plan.arena_bytes,
                "hidden": plan.hidden,
                "n_adapters": plan.n_adapters,
                "given": plan.given_width,
            },
            {
                "n_threads": 2,
                "block_tokens": BLOCK_TOKENS,
                "n_blocks": N_BLOCKS,
                "kv_type": 0,
                "n_window_blocks": N_BLOCKS,
            },
            arrays[-len(tensors) :],  # kept last, in order
        )

    def copy(self) -> Records:
        return Records(
            self.ops.copy(),
            self.buffers.copy(),
            self.kv_layers.copy(),
            [dict(tensor) for tensor in self.tensors],
            dict(self.sizes),
            dict(self.options),
            self.data,
        )

    def create(self) -> tuple[Any, str]:
        """The engine, or NULL and the message of the refusal."""
        tensors = FFI.new("mt_tensor[]", self.tensors)
        keep = [FFI.from_buffer(values) for values in self.data]
        for record, pointer in zip(tensors, keep, strict=True):
            record.data = pointer
        plan = FFI.new("mt_plan *", self.sizes)
        plan.n_ops, plan.n_buffers = len(self.ops), len(self.buffers)
        plan.n_tensors, plan.n_kv_layers = len(self.tensors), len(self.kv_layers)
        plan.ops = FFI.from_buffer("mt_op[]", self.ops)
        plan.buffers = FFI.from_buffer("mt_buffer[]", self.buffers)
        plan.kv_layers = FFI.from_buffer("mt_kv_layer[]", self.kv_layers)
        plan.tensors = tensors
        options = FFI.new("mt_options *", {"isa": -1, **self.options})
        error = FFI.new("char[]", LIB.MT_ERR_BYTES)
        engine = LIB.mt_engine_create(plan, options, FFI.new("mt_bad_value *"), error)
        return engine, FFI.string(error).decode()

    @property
    def pool_bytes(self) -> int:
        k = self.kv_layers.astype([(name, "i8") for name in self.kv_layers.dtype.names or ()])
        values = k["kv_heads"].astype(object) * (k["head_dim"] + k["value_dim"])
        return 4 * int(values.sum()) * self.options["n_blocks"] * self.options["block_tokens"]

    @property
    def logits_width(self) -> int:
        widths = [int(b["width"]) for b in self.buffers if b["is_logits"]]
        return max(widths, default=1)

    @property
    def hidden_width(self) -> int:
        at = self.sizes["hidden"]
        return max(1, int(self.buffers[at]["width"])) if 0 <= at < len(self.buffers) else 1


@lru_cache
def sound_records(arch: str, activations: BufferKind = BufferKind.Q8) -> Records:
    """Of a model of one layer in three formats, one of them floats; shared, so copy before use."""
    dims = TinyDims(dim=256, ffn_dim=256, n_layers=1, vocab_size=40, window=9)
    model = tiny_model(arch, formats=("Q4_K", "F32", "Q8_0"), dims=dims)
    plan = record_plan(model.config, model.weights, MAX_ROWS, activations=activations)
    return Records.of(plan, model.weights)


def run_two_steps(engine: Any, logits_width: int, hidden_width: int) -> None:
    """A chunk and then single rows; whether C refuses a step is its own affair."""
    error = FFI.new("char[]", LIB.MT_ERR_BYTES)
    tables = [[3, 1], [0, 2]]
    for chunks in (
        [Chunk([1, 2, 3, 4, 5], 0, tables[0]), Chunk([6, 7], 0, tables[1])],
        [Chunk([8], 5, tables[0]), Chunk([9], 2, tables[1])],
    ):
        step = replace(make_step(chunks, out_rows=[1]), hidden_rows=np.array([0], np.int32))
        logits = np.empty((step.n_out, logits_width), np.float32)
        record = FFI.new("mt_step *")
        record.n_rows, record.n_seqs, record.n_out = step.n_rows, step.n_seqs, step.n_out
        record.table_width = step.block_table.shape[1]
        for name in STEP_ARRAYS:
            setattr(record, name, FFI.cast("int32_t *", getattr(step, name).ctypes.data))
        record.logits = FFI.from_buffer("float[]", logits)
        hidden = np.empty((step.n_hidden, hidden_width), np.float32)
        record.hidden, record.n_hidden = FFI.from_buffer("float[]", hidden), step.n_hidden
        LIB.mt_engine_run(engine, record, error)
    LIB.mt_engine_copy_block(engine, (0, 0), (1, 1), error)
