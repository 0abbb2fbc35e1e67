"""One step as flat arrays: all an executor learns about the requests it serves.

Owns: Step and its layout from scheduled requests. Must not know: why these rows were chosen
(scheduler), what an executor does with them, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import ModelError

if TYPE_CHECKING:  # executors import Step and need nothing of requests
    from .request import Scheduled

MOST_GUESSES = 8
"""Rows of a sequence and step that may be taken back."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """C-contiguous int32 arrays. The rows of a sequence are neighbours with rising positions.

    The key and value of (sequence s, position p) live in the slot
    block_table[s, p // block_tokens] * block_tokens + p % block_tokens.
    """

    tokens: Int32s
    """(n_rows) token ids."""
    positions: Int32s
    """(n_rows) place of each row in its sequence."""
    seq_start: Int32s
    """(n_seqs + 1) sequence s owns rows seq_start[s] … seq_start[s + 1] - 1."""
    block_table: Int32s
    """(n_seqs, table_width) block ids; entries past a sequence's last position are 0, unread."""
    out_rows: Int32s
    """(n_out) rows whose logits are wanted, ascending."""
    window_table: Int32s = None  # type: ignore[assignment]  # left out: the block_table
    """(n_seqs, table_width) the same for layers with a window, whose keys and values have blocks of
    their own; entries before the window of a sequence's first row are unread."""
    hidden_rows: Int32s = None  # type: ignore[assignment]  # left out: none
    """(n_hidden) rows whose hidden states are wanted, ascending."""
    states: Int32s = None  # type: ignore[assignment]  # left out: the number of the sequence
    """(n_seqs) where recurrent layers keep the state of each sequence. Before its position 0 it is
    zeros, whatever the slot holds."""
    guesses: Int32s = None  # type: ignore[assignment]  # left out: none
    """(n_seqs) Of a sequence's rows the last so many are guesses. Recurrent layers leave its state
    as it is before them, and keep what they read of them."""
    replays: Int32s = None  # type: ignore[assignment]  # left out: none
    """(n_seqs) So many guesses of the sequence's last step were right, the first ones: recurrent
    layers take them, from what they have kept, before its rows."""
    segments: Int32s = None  # type: ignore[assignment]  # left out: all of the first
    """(n_rows) which of its texts a row is of, where a sequence is made of two."""
    adapters: Float32s = None  # type: ignore[assignment]  # left out: none
    """(n_seqs, n_adapters) how much of each adapter of the plan a sequence gets."""
    given: Float32s = None  # type: ignore[assignment]  # left out: none
    """(n_rows, width) values of every row that the plan takes beside its token: its given_width."""

    def __post_init__(self) -> None:
        if self.window_table is None:
            object.__setattr__(self, "window_table", self.block_table)
        if self.hidden_rows is None:
            object.__setattr__(self, "hidden_rows", np.empty(0, np.int32))
        if self.states is None:
            object.__setattr__(self, "states", np.arange(self.n_seqs, dtype=np.int32))
        for field in ("guesses", "replays"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, np.zeros(self.n_seqs, np.int32))
        if self.segments is None:
            object.__setattr__(self, "segments", np.zeros(self.n_rows, np.int32))
        if self.adapters is None:
            object.__setattr__(self, "adapters", np.empty((self.n_seqs, 0), np.float32))
        if self.given is None:
            object.__setattr__(self, "given", np.empty((self.n_rows, 0), np.float32))

    def lengths(self) -> Int32s:
        """(n_rows) the tokens that each row's sequence has at the end of this step."""
        ends = self.positions[self.seq_start[1:] - 1] + np.int32(1)
        return np.repeat(ends, np.diff(self.seq_start))

    @property
    def n_rows(self) -> int:
        return len(self.tokens)

    @property
    def n_seqs(self) -> int:
        return len(self.seq_start) - 1

    @property
    def n_out(self) -> int:
        return len(self.out_rows)

    @property
    def n_hidden(self) -> int:
        return len(self.hidden_rows)


def check_adapters(step: Step, n_adapters: int) -> None:
    """Raises ModelError unless the step says of each sequence how much it gets of each adapter."""
    if step.adapters.shape != (step.n_seqs, n_adapters):
        raise ModelError(
            f"the step has shares of adapters {step.adapters.shape}, "
            f"expected ({step.n_seqs}, {n_adapters})"
        )


def check_given(step: Step, width: int) -> None:
    """Raises ModelError unless the step gives as many values of each row as the plan takes."""
    if step.given.shape != (step.n_rows, width):
        raise ModelError(
            f"the step gives rows of shape {step.given.shape}, expected ({step.n_rows}, {width})"
        )


def build_step(scheduled: Sequence[Scheduled], window_block_of: Int32s | None = None) -> Step:
    """Lays out the granted rows in the given order. Every grant has at least one row.

    window_block_of: (n_blocks) what stands for a block in windowed layers, if it is not itself.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    seq_start, out_rows, hidden_rows = [0], list[int](), list[int]()
    tables = [item.request.table.blocks for item in scheduled]
    for item in scheduled:
        start, end = item.request.n_computed, item.request.n_computed + item.n_rows
        tokens += item.request.buffer[start:end].tolist()
        positions += range(start, end)
        second_at = item.request.second_at
        n_first = item.n_rows if second_at is None else min(max(second_at - start, 0), item.n_rows)
        segments += [0] * n_first + [1] * (item.n_rows - n_first)
        seq_start.append(len(tokens))
        out_rows += range(len(tokens) - item.n_out, len(tokens))
        hidden_rows += range(len(tokens) - item.n_hidden, len(tokens))
    width = max(map(len, tables), default=0)
    # One array from lists: a decode step has few numbers, and each call of NumPy costs a hundred.
    padded = [blocks + [0] * (width - len(blocks)) for blocks in tables]
    block_table = np.array(padded, np.int32).reshape(len(tables), width)
    return Step(
        window_table=block_table if window_block_of is None else window_block_of[block_table],
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        seq_start=np.array(seq_start, np.int32),
        block_table=block_table,
        out_rows=np.array(out_rows, np.int32),
        hidden_rows=np.array(hidden_rows, np.int32),
        segments=np.array(segments, np.int32),
        states=np.array([item.request.table.state for item in scheduled], np.int32),
        guesses=np.array([item.n_draft for item in scheduled], np.int32),
        replays=np.array([item.request.table.n_replays for item in scheduled], np.int32),
        adapters=np.array([item.request.adapters for item in scheduled], np.float32),
    )
