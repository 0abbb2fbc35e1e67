"""Rows of what guesses tokens beside the model: blocks of a pool of its own, and their steps.

Owns: the free blocks, the layout of a step of several sequences. Must not know: what is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .executors import Executor
from .step import Float32s, Step

FEW_ROWS = 12
"""Rows of a request that a step computes with those of others; longer texts are read alone."""


class OwnBlocks:
    """Blocks of an executor that nobody else uses."""

    def __init__(self, executor: Executor) -> None:
        self._block_tokens = executor.block_tokens
        self.free = list(range(executor.n_blocks))[::-1]

    def grow(self, blocks: list[int], n_tokens: int) -> bool:
        """Appends blocks until they have room for so many tokens; False and none if too few."""
        n_new = -(-n_tokens // self._block_tokens) - len(blocks)
        if n_new > len(self.free):
            return False
        blocks += [self.free.pop() for _ in range(n_new)]
        return True

    def give_back(self, blocks: list[int]) -> None:
        self.free += blocks
        blocks.clear()


class Rows(NamedTuple):
    """Of one sequence: tokens behind `start` others whose rows are computed."""

    blocks: list[int]
    start: int
    tokens: Sequence[int]


def step_of(sequences: Sequence[Rows], given: Float32s | None = None, *, wants: bool) -> Step:
    """wants: the logits of each one's last row; with given, (n_rows, width), what is behind the
    norm as well."""
    width = max(len(rows.blocks) for rows in sequences)
    ends = np.cumsum([0, *(len(rows.tokens) for rows in sequences)], dtype=np.int32)
    tables = [rows.blocks + [0] * (width - len(rows.blocks)) for rows in sequences]
    positions = [rows.start + i for rows in sequences for i in range(len(rows.tokens))]
    last = ends[1:] - np.int32(1) if wants else np.empty(0, np.int32)
    return Step(
        tokens=np.array([token for rows in sequences for token in rows.tokens], np.int32),
        positions=np.array(positions, np.int32),
        seq_start=ends,
        block_table=np.array(tables, np.int32),
        out_rows=last,
        hidden_rows=None if given is None else last,  # type: ignore[arg-type]
        given=given,  # type: ignore[arg-type]
    )
