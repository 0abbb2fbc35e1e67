"""What a step of so many rows costs on this machine, compared with a step of one.

Owns: the measurement at start-up and its correction by the steps that follow. Must not know: what
is in the rows.

Rows of one step share the reading of weights: up to where multiplying takes as long as reading, two
cost little more than one. Where that is depends on model, machine and other programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from .executors import Executor
from .step import Step

MEASURED = (1, 2, 3, 4, 6, 8, 12, 16)
_TIMES = 3  # that a step is measured
_ENOUGH_S = 0.2  # steps that have taken so long together are not measured again
_DRIFT, _OWN = 0.1, 0.05  # weights of a new time in what all steps share, and in its own
_OUTLIER = 1.3  # beyond this multiple of what was expected, a time counts as this: most are noise
_FORGET = 0.002  # of how steps of other numbers of rows have differed from the first measurement


class StepCosts:
    def __init__(self, seconds: dict[int, float]) -> None:
        """seconds: of steps of so many rows, with one row among them."""
        self.most = max(seconds)
        ns = sorted(seconds)
        of_all = np.interp(np.arange(self.most + 1), ns, [seconds[n] for n in ns])
        # More rows never take less. Where times say so, those of fewer rows were disturbed.
        self._seconds: list[float] = np.minimum.accumulate(of_all[::-1])[::-1].tolist()
        self._measured = tuple(self._seconds)
        self._pace = 1.0  # of all steps since then

    @classmethod
    def measure(
        cls,
        executor: Executor,
        n_adapters: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        *,
        given_width: int = 0,
    ) -> StepCosts:
        """Runs a few steps in blocks that nobody holds yet, with logits of all rows: those of a
        request all of whose guesses are right, so that states are brought up to them as well."""
        seconds: dict[int, float] = {}
        for n in (n for n in MEASURED if n <= executor.max_rows):
            texts = _shared_out(n, executor)
            if not _has_room(executor, texts):
                break
            executor.run(_step_of(texts, 0, executor, (n_adapters, given_width)))
            took: list[float] = []
            while len(took) < _TIMES and sum(took) < _ENOUGH_S:
                step = _step_of(texts, 1 + len(took), executor, (n_adapters, given_width))
                start = clock()
                executor.run(step)
                took.append(clock() - start)
            seconds[n] = min(took)
        return cls(seconds)

    def of(self, n_rows: int) -> float:
        """Seconds; beyond what was measured each row costs as much as the last ones."""
        if n_rows <= self.most:
            return self._seconds[n_rows]
        half = self.most // 2
        per_row = (self._seconds[self.most] - self._seconds[half]) / max(self.most - half, 1)
        return self._seconds[self.most] + per_row * (n_rows - self.most)

    def observe(self, n_rows: int, seconds: float) -> None:
        """A step has taken so long: all may take longer now (another program, a longer context), or
        this one alone was misjudged."""
        if not 0 < n_rows <= self.most:
            return
        ratio = min(max(seconds / self._seconds[n_rows], 1 / _OUTLIER), _OUTLIER)
        drift = ratio**_DRIFT
        self._pace *= drift
        # What was dear once is not so for ever: nobody would find out, as nobody guesses so much.
        self._seconds = [
            (1 - _FORGET) * drift * now + _FORGET * self._pace * first
            for now, first in zip(self._seconds, self._measured, strict=True)
        ]
        own = self._seconds[n_rows] = self._seconds[n_rows] * ratio**_OWN
        for n, known in enumerate(self._seconds):  # never less for more rows; this one is newest
            self._seconds[n] = min(known, own) if n < n_rows else max(known, own)


def _shared_out(n: int, executor: Executor) -> list[int]:
    """n rows of as few texts as may have so many guesses."""
    n_texts = -(-n // (1 + executor.n_guesses)) if executor.n_states else 1
    return [n // n_texts + (i < n % n_texts) for i in range(n_texts)]


def _blocks_of(texts: Sequence[int], executor: Executor) -> int:
    """That each of the texts needs in all steps."""
    return -(-max(texts) * (1 + _TIMES) // executor.block_tokens)


def _has_room(executor: Executor, texts: Sequence[int]) -> bool:
    n_texts = len(texts)
    has_states = n_texts <= max(executor.n_states, 1)
    return has_states and n_texts * _blocks_of(texts, executor) <= executor.n_blocks


def _step_of(
    texts: Sequence[int], n_before: int, executor: Executor, widths: tuple[int, int]
) -> Step:
    """So many rows of each text, behind n_before such steps; all but the first of them guesses.
    widths: of adapters, and of the rows that the step gives."""
    n_adapters, given_width = widths
    rows, n_blocks = np.array(texts, np.int32), _blocks_of(texts, executor)
    starts = np.cumsum([0, *texts], dtype=np.int32)
    within = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], rows)
    return Step(
        tokens=np.zeros(starts[-1], np.int32),
        positions=within + np.repeat(rows * np.int32(n_before), rows),
        seq_start=starts,
        block_table=np.arange(len(texts) * n_blocks, dtype=np.int32).reshape(-1, n_blocks),
        out_rows=np.arange(starts[-1], dtype=np.int32),
        guesses=rows - np.int32(1),
        replays=(rows - np.int32(1)) * np.int32(n_before > 0),
        adapters=np.zeros((len(texts), n_adapters), np.float32),
        given=np.zeros((starts[-1], given_width), np.float32),
    )
