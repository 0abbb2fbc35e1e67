"""The cases of a benchmark: which steps they run, and running them on an executor.
Owns the cases, the blocks of their sequences and the clock; must not know what a time means.

Every sequence owns blocks of its own, filled to the greatest depth by a real prefill once, so that
keys and values are neither zero nor shared. A case writes only positions from its depth on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from martlet.quant.errors import MartletError
from martlet.runtime.executors import Executor
from martlet.runtime.step import Step

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """prefill: n_tokens rows of one sequence. decode: n_tokens steps of one row per sequence."""

    kind: Literal["prefill", "decode"]
    n_tokens: int
    depth: int = 0
    n_seqs: int = 1

    @property
    def label(self) -> str:
        seqs = f" x {self.n_seqs}" if self.n_seqs > 1 else ""
        depth = f" @ {self.depth}" if self.depth else ""
        return f"{self.kind} {self.n_tokens}{seqs}{depth}"

    @property
    def tokens_in_all(self) -> int:
        return self.n_tokens * self.n_seqs


def make_cases(
    prefill: int, decode: int, batches: Sequence[int], depths: Sequence[int]
) -> list[Case]:
    """All combinations; 0 leaves a kind out. One sequence is always among the batches."""
    cases = []
    for depth in sorted(set(depths)):
        cases += [Case("prefill", prefill, depth)] if prefill else []
        cases += [Case("decode", decode, depth, n) for n in sorted({1, *batches}) if decode]
    if not cases:
        raise MartletError("nothing to measure: --prefill and --decode are both 0")
    return cases


@dataclass(frozen=True)
class Room:
    """What the cases need of the KV pool."""

    n_seqs: int
    positions: int  # of each sequence

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Room:
        return cls(max(c.n_seqs for c in cases), max(c.depth + c.n_tokens for c in cases))

    def blocks_per_seq(self, block_tokens: int) -> int:
        return -(-self.positions // block_tokens)


@dataclass
class Bench:
    """An executor with room for the cases, and random tokens for them."""

    executor: Executor
    room: Room
    vocab_size: int
    seed: int = 0

    def run(self, case: Case) -> float:
        """Seconds of the case's steps; laying them out is not counted."""
        steps = list(self.steps(case))
        start = time.perf_counter()
        for step in steps:
            self.executor.run(step)
        return time.perf_counter() - start

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Fills every sequence to the greatest depth, and runs the start of each case once."""
        fill = max(case.depth for case in cases)
        if fill:
            self._run(Case("prefill", fill))
            self._copy_first_sequence(fill, max(case.n_seqs for case in cases))
        for case in cases:
            for step, _ in zip(self.steps(case), range(WARM_UP_STEPS), strict=False):
                self.executor.run(step)

    def steps(self, case: Case) -> Iterator[Step]:
        rng = np.random.default_rng(self.seed)
        tokens = rng.integers(0, self.vocab_size, case.tokens_in_all, dtype=np.int32)
        if case.kind == "decode":
            yield from self._decode_steps(case, tokens)
        else:
            yield from self._prefill_steps(case, tokens)

    def _prefill_steps(self, case: Case, tokens: np.ndarray) -> Iterator[Step]:
        """As many rows per step as the executor takes; logits of the last row of all."""
        for start in range(0, case.n_tokens, self.executor.max_rows):
            end = min(start + self.executor.max_rows, case.n_tokens)
            yield Step(
                tokens=tokens[start:end],
                positions=np.arange(case.depth + start, case.depth + end, dtype=np.int32),
                seq_start=np.array([0, end - start], np.int32),
                block_table=self._tables[:1],
                out_rows=np.array([end - start - 1] if end == case.n_tokens else [], np.int32),
            )

    def _decode_steps(self, case: Case, tokens: np.ndarray) -> Iterator[Step]:
        n = case.n_seqs
        if n > self.executor.max_rows:
            raise MartletError(f"{n} sequences exceed {self.executor.max_rows} rows per step")
        for at in range(case.n_tokens):
            yield Step(
                tokens=tokens[at * n : (at + 1) * n],
                positions=np.full(n, case.depth + at, np.int32),
                seq_start=np.arange(n + 1, dtype=np.int32),
                block_table=self._tables[:n],
                out_rows=np.arange(n, dtype=np.int32),
            )

    @cached_property
    def _tables(self) -> np.ndarray:
        """int32 (n_seqs, blocks_per_seq): block ids, none shared."""
        shape = self.room.n_seqs, self.room.blocks_per_seq(self.executor.block_tokens)
        return np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)

    def _run(self, case: Case) -> None:
        for step in self.steps(case):
            self.executor.run(step)

    def _copy_first_sequence(self, positions: int, n_seqs: int) -> None:
        n_blocks = -(-positions // self.executor.block_tokens)
        for row in self._tables[1:n_seqs]:
            for src, dst in zip(self._tables[0, :n_blocks], row, strict=False):
                self.executor.copy_block(int(src), int(dst))
