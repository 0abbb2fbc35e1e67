"""The buffers of one step of the reference, and how ops read and write them.

Must not know weights, caches or what an op computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..ops import BufferKind, RowKind
from ..plan import Op, Plan
from ..step import Step
from .reference_math import Q8Rows, quantize_q8, round_bf16


class Pairs(NamedTuple):
    """Rows and experts they have chosen, sorted by expert, then by row; each (n_pairs)."""

    rows: np.ndarray
    experts: np.ndarray
    weights: np.ndarray


_ROUNDERS: dict[BufferKind, Callable[[np.ndarray], np.ndarray | Q8Rows]] = {
    BufferKind.Q8: quantize_q8,
    BufferKind.BF16: round_bf16,
}


class Run:
    """The buffers and row tables of one step."""

    def __init__(self, plan: Plan, step: Step, block_tokens: int) -> None:
        self.plan = plan
        self.step = step
        self.block_tokens = block_tokens
        n_rows = {
            RowKind.ALL: len(step.tokens),
            RowKind.OUT: len(step.out_rows),
            RowKind.HIDDEN: len(step.hidden_rows),
        }
        self.buffers: list[np.ndarray | Q8Rows] = [
            np.zeros((n_rows[b.rows] * b.per_row, b.width), np.float32) for b in plan.buffers
        ]
        n_seqs = len(step.seq_start) - 1
        self.row_seq = np.repeat(np.arange(n_seqs), np.diff(step.seq_start))  # (n_rows)
        self.lengths = step.lengths()

    def seq_of(self, buffer: int) -> np.ndarray:
        """The sequence of each row of a buffer."""
        taken = {RowKind.OUT: self.step.out_rows, RowKind.HIDDEN: self.step.hidden_rows}
        rows = self.plan.buffers[buffer].rows
        return self.row_seq[taken[rows]] if rows in taken else self.row_seq

    def slots_of(
        self, seq: np.ndarray | int, positions: np.ndarray, is_windowed: bool
    ) -> np.ndarray:
        table = self.step.window_table if is_windowed else self.step.block_table
        blocks = table[seq, positions // self.block_tokens]
        return blocks * self.block_tokens + positions % self.block_tokens

    def floats(self, buffer: int) -> np.ndarray:
        rows = self.buffers[buffer]
        return rows.floats() if isinstance(rows, Q8Rows) else rows

    def planes(self, op: Op) -> np.ndarray:
        """The rows x of a product, whether the plan keeps them in one plane or in two."""
        x = self.floats(op.inputs[0])
        return x if op.inputs[1] < 0 else x + self.floats(op.inputs[1])

    def pairs(self, op: Op) -> Pairs:
        used = op.int_of("used")
        ids, weights = np.split(self.floats(op.inputs[2]), [used], axis=1)
        experts = ids.astype(np.intp).reshape(-1)
        order = np.argsort(experts, kind="stable")
        return Pairs(order // used, experts[order], weights.reshape(-1)[order])

    def store(self, op: Op, values: np.ndarray, first_col: int = 0) -> None:
        """Writes or adds an op's result; buffers of other kinds than F32 take whole rows."""
        round_rows = _ROUNDERS.get(self.plan.buffers[op.out].kind)
        if round_rows is not None:
            self.buffers[op.out] = round_rows(values)
            if op.out_rest >= 0:
                self.buffers[op.out_rest] = quantize_q8(values - self.floats(op.out))
            return
        out = self.floats(op.out)[:, first_col : first_col + values.shape[1]]
        out[...] = out + values if op.accumulate else values

    def split_qkv(self, op: Op) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The q, k and v heads in the op's first input, each (n, heads, dim)."""
        rows = self.floats(op.inputs[0])
        heads, kv_heads = op.int_of("heads"), op.int_of("kv_heads")
        head_dim, value_dim = op.int_of("head_dim"), op.int_of("value_dim")
        ends = np.cumsum([heads * head_dim, kv_heads * head_dim])
        q, k, v = np.split(rows, ends, axis=1)
        n = len(rows)
        if not k.size:  # another layer's are read
            kv_heads = 0
        k = k.reshape(n, kv_heads, head_dim)
        v = k[:, :, :value_dim] if self.is_latent(op) else v.reshape(n, kv_heads, value_dim)
        return q.reshape(n, heads, head_dim), k, v

    def is_latent(self, op: Op) -> bool:
        return self.plan.kv_layers[op.int_of("kv_layer")].is_latent

    def hidden(self) -> np.ndarray:
        at = self.plan.hidden
        return self.floats(at) if at >= 0 else np.empty((0, 0), np.float32)

    def logits(self) -> np.ndarray:
        at = next((i for i, b in enumerate(self.plan.buffers) if b.is_logits), -1)
        return self.floats(at) if at >= 0 else np.empty((0, 0), np.float32)
