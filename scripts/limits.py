"""What this machine can do at best, measured in a moment for those who only want to know.
Owns how often; `martlet bench` samples the same limits throughout its run."""

from __future__ import annotations

import contextlib

from martlet.quant.errors import MartletError
from martlet.runtime.machine import choose_threads
from martlet.runtime.work import Speed
from martlet.scripts.bench_measure import Limits
from martlet.scripts.bench_open import Options, open_limits

N_SAMPLES = 3


def measure_speed(options: Options, span_bytes: int = 0) -> Speed:
    """Medians. span_bytes: what a step reads of its model, which may fit a cache; 0: any model.
    Raises MartletError where there is nothing to measure with."""
    with contextlib.ExitStack() as stack:
        machine = open_limits(stack, choose_threads(options.threads).count, options)
        limits = Limits(machine, span_bytes)
        for _ in range(N_SAMPLES):
            limits.sample()
    speed = limits.speed()
    if speed is None:
        raise MartletError("without the machine's limits nothing can be said of what binds")
    return speed
