"""How many prompt rows a step may hold beside running streams, from the times of earlier steps.

Owns: the measured times and the target. Must not know: requests, clocks, executors.

A step of n streams takes alone_s[n]; each prompt row beside them adds row_s. Both are running
means. By default a step with prompt rows may take STRETCH times as long as its streams would take
without them, so a stream's gap at most doubles while somebody sends a long prompt. For prompts that
one step could compute it may take SHORT_WEIGHT times longer: their rows delay the streams as much
in one step as in ten, and spread over ten they delay their owner as well. Where more of them wait
than streams run, the weight grows in proportion, to MOST_WEIGHT. A target in milliseconds replaces
all that. A step always holds MIN_ROWS prompt rows, or a slow machine would never get through; and
now and then none, to measure the streams alone.
"""

from __future__ import annotations

STRETCH = 2.0
SHORT_WEIGHT, MOST_WEIGHT = 4.0, 8.0
MIN_ROWS = 4
MEASURE_EVERY = 64
UNLIMITED = 1 << 30

_WEIGHT = 0.25  # of a new time in its running mean
_OUTLIER = 2.0  # times beyond this multiple of the mean are the machine's, not ours


class Pace:
    def __init__(self, step_ms: float | None = None) -> None:
        self._target_s = None if step_ms is None else step_ms / 1e3
        self._alone_s: dict[int, float] = {}
        self._row_s: float | None = None
        self._allowed = MIN_ROWS
        self._n_since: dict[int, int] = {}  # steps with prompt rows since the streams ran alone

    def prompt_rows(self, n_streams: int, n_short: int) -> int:
        """Most prompt rows of the next step; n_short prompts fit a step. Without streams
        only a target set by hand limits."""
        if not n_streams and self._target_s is None:
            return UNLIMITED
        if n_streams and self._n_since.get(n_streams, MEASURE_EVERY) >= MEASURE_EVERY:
            return 0
        if self._row_s is None:
            return MIN_ROWS
        alone_s = self._alone_s.get(n_streams, 0.0)
        weight = max(SHORT_WEIGHT, n_short / max(1, n_streams)) if n_short else 1.0
        derived_s = STRETCH * min(weight, MOST_WEIGHT) * alone_s
        target_s = derived_s if self._target_s is None else self._target_s
        rows = int(max(0.0, target_s - alone_s) / self._row_s)
        # From few rows up, doubling: a wrong estimate then costs one step a little.
        self._allowed = max(MIN_ROWS, min(rows, 2 * self._allowed))
        return self._allowed

    def observe(self, n_streams: int, n_prompt_rows: int, seconds: float) -> None:
        if not n_prompt_rows:
            mean = self._alone_s.get(n_streams)
            self._alone_s[n_streams] = _mean(mean, seconds)
            self._n_since[n_streams] = 0
        elif not n_streams:
            # Long chunks are cheaper per row than short ones beside streams: a first guess only.
            if self._row_s is None or self._target_s is not None:
                self._row_s = _mean(self._row_s, seconds / n_prompt_rows)
        else:
            self._n_since[n_streams] = self._n_since.get(n_streams, MEASURE_EVERY) + 1
            added_s = max(seconds - self._alone_s.get(n_streams, 0.0), seconds / 16)
            self._row_s = _mean(self._row_s, added_s / n_prompt_rows)


def _mean(mean: float | None, value: float) -> float:
    value = max(value, 1e-9)
    if mean is None:
        return value
    return mean + _WEIGHT * (min(value, _OUTLIER * mean) - mean)
