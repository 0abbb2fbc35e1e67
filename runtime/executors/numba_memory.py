"""What the calls of a numba plan read and write: buffers, the KV pool, states, and a step's arrays.

Must not know: ops, weights, or which kernel reads what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ops import BufferKind, KvType, RowKind
from ..plan import Plan
from ..step import Step
from .numba_math import Q8Views
from .numba_weights import LANES, aligned

_KV_DTYPES = {KvType.F16: np.uint16, KvType.F32: np.float32}  # uint16: the bits of float16
NO_FLOATS = np.empty((0, 0), np.float32)
NO_Q8 = Q8Views(*(np.empty((0, 0), dtype) for dtype in (np.int8, np.int32, np.float32)))


@dataclass(frozen=True)
class Rows:
    """A step's arrays as the kernels want them."""

    tokens: np.ndarray  # (n_rows) int32
    positions: np.ndarray  # (n_rows) int32
    segments: np.ndarray  # (n_rows) int32
    lengths: np.ndarray  # (n_rows) int32 tokens of a row's sequence at the end of the step
    row_seq: np.ndarray  # (n_rows) int32 index into block_table
    slots: tuple[np.ndarray, np.ndarray]  # (n_rows) int32: in full layers, in windowed ones
    tables: tuple[np.ndarray, np.ndarray]  # (n_seqs, table_width) int32: the same
    out_rows: np.ndarray  # (n_out) int32
    hidden_rows: np.ndarray  # (n_hidden) int32
    seq_start: np.ndarray  # (n_seqs + 1) int32
    states: np.ndarray  # (n_seqs) int32
    guesses: np.ndarray  # (n_seqs) int32
    replays: np.ndarray  # (n_seqs) int32
    adapters: np.ndarray  # (n_seqs, n_adapters) float32
    given: np.ndarray  # (n_rows, width) float32
    counts: dict[RowKind, int]

    @classmethod
    def of(cls, step: Step, block_tokens: int) -> Rows:
        # Copies, because numba compiles every kernel again for a read-only array.
        (
            tokens, positions, segments, lengths, table, window_table, out_rows, hidden_rows,
            seq_start, states, guesses, replays,
        ) = (
            np.array(a, np.int32, order="C")
            for a in (
                step.tokens, step.positions, step.segments, step.lengths(), step.block_table,
                step.window_table, step.out_rows, step.hidden_rows, step.seq_start, step.states,
                step.guesses, step.replays,
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
            tokens, positions, segments, lengths, row_seq, both, tables, out_rows, hidden_rows,
            seq_start, states, guesses, replays, step.adapters, step.given, counts,
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
    guesses: list[np.ndarray]  # the same: (n_states, n_guesses, floats of a row)

    @classmethod
    def of(
        cls,
        plan: Plan,
        block_tokens: int,
        n_blocks: int,
        n_window_blocks: int,
        n_states: int,
        n_guesses: int,
        kv_type: KvType,
    ) -> Memory:
        arena = aligned((plan.arena_bytes,), np.uint8)
        floats, q8 = [NO_FLOATS] * len(plan.buffers), [NO_Q8] * len(plan.buffers)
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
            width = -(-k.v_dim // LANES) * LANES
            keys.append(np.zeros(n_slots * k.kv_heads * k.head_dim, dtype))
            values.append(np.zeros(n_slots * k.kv_heads * width, dtype))
        states = [np.zeros((n_states, width), np.float32) for width in plan.states]
        guesses = [np.zeros((n_states, n_guesses, n), np.float32) for n in plan.inputs]
        return cls(floats, q8, keys, values, block_tokens, is_windowed, states, guesses)

    def layer(self, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        return self.keys[n], self.values[n], self.block_tokens
