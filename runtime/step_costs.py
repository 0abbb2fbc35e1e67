"""What a step of so many rows costs on this machine, compared with a step of one.

Owns: the measurement at start-up and its correction by the steps that follow. Must not know: what
is in the rows.

Rows of one step share the reading of weights: up to where multiplying takes as long as reading, two
cost little more than one. Where that is depends on model, machine and other programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .executors import Executor
from .step import Step

MEASURED = (1, 2, 3, 4, 6, 8, 12, 16)
_LONG_S = 0.05  # steps that take longer are measured once
_DRIFT, _OWN = 0.1, 0.1  # weights of a new time in what all steps share, and in its own
_OUTLIER = 2.0  # beyond this multiple of what was expected, a time is the machine's


class StepCosts:
    def __init__(self, seconds: dict[int, float]) -> None:
        """seconds: of steps of so many rows, with one row among them."""
        self.most = max(seconds)
        ns = sorted(seconds)
        of_all = np.interp(np.arange(self.most + 1), ns, [seconds[n] for n in ns])
        # More rows never take less: what says so is noise, and would be drafted for.
        self._seconds: list[float] = np.maximum.accumulate(of_all).tolist()

    @classmethod
    def measure(
        cls,
        executor: Executor,
        n_adapters: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> StepCosts:
        """Runs a few steps in blocks that nobody holds yet, with logits of all rows."""
        most = min(executor.max_rows, executor.n_blocks * executor.block_tokens)
        seconds: dict[int, float] = {}
        for n in (n for n in MEASURED if n <= most):
            step = _step_of(n, executor, n_adapters)
            executor.run(step)
            took: list[float] = []
            while len(took) < (1 if took and took[0] > _LONG_S else 3):
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
        self._seconds = [s * drift for s in self._seconds]
        own = self._seconds[n_rows] = self._seconds[n_rows] * ratio**_OWN
        for n, known in enumerate(self._seconds):  # never less for more rows; this one is newest
            self._seconds[n] = min(known, own) if n < n_rows else max(known, own)


def _step_of(n: int, executor: Executor, n_adapters: int) -> Step:
    n_blocks = -(-n // executor.block_tokens)
    return Step(
        tokens=np.zeros(n, np.int32),
        positions=np.arange(n, dtype=np.int32),
        seq_start=np.array([0, n], np.int32),
        block_table=np.arange(n_blocks, dtype=np.int32)[None],
        out_rows=np.arange(n, dtype=np.int32),
        adapters=np.zeros((1, n_adapters), np.float32),
    )
