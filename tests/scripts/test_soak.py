"""`martlet soak`: a short run passes, and each thing it watches for fails it."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from martlet.scripts.soak import Soak

from ..runtime.harness import engine_of
from ..runtime.scripted import VOCAB_SIZE, hashed
from .conftest import Martlet

SIZES: dict[str, Any] = {"block_tokens": 16, "n_blocks": 24}


def soaked(resident: Any = lambda: 10**8, n_requests: int = 120, **sizes: Any) -> Soak:
    engine, executor = engine_of(
        hashed(250), context=128, max_queue=64, max_running=8, executor={**SIZES, **sizes}
    )
    executor.on_step = lambda step: executor.steps.clear()
    run = Soak(engine, VOCAB_SIZE, Random(1), resident)
    run.serve(n_requests)
    return run


@pytest.mark.parametrize("windows", [{}, {"window": 40, "n_window_blocks": 20}])
def test_all_is_well(windows: dict[str, int]) -> None:
    run = soaked(**windows)
    assert run.faults(0) == []
    assert sum(run.reasons.values()) == 120
    assert {"length", "cancelled"} <= set(run.reasons)
    stats = run.engine.stats()
    assert stats.tokens_cached
    assert (stats.window_blocks_total > 0) == bool(windows)


def test_growth_after_warm_up_is_a_fault() -> None:
    sizes = iter(range(10**8, 10**9, 10**6))
    run = soaked(lambda: next(sizes))
    (fault,) = run.faults(1000)
    assert "memory grew by" in fault
    assert run.faults(10**9) == []


def test_lost_requests_and_blocks_are_faults() -> None:
    run = soaked()
    run.n_ends["soak-7"] = 2
    pool = run.engine.scheduler.pool
    pool._free.pop_front()
    run.reasons["error"] = 3
    shown = "\n".join(run.faults(0))
    for expected in ("soak-7", "3 requests ended with an error", "1 blocks", "inconsistent"):
        assert expected in shown


def test_the_command(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("soak", str(tiny_file), "-n", "200", "--context", "128", "--kv-bytes", "100K")
    assert done.returncode == 0, done.stderr
    assert "200 requests: " in done.stdout
    assert "all well" in done.stdout
    assert done.stderr.count("MB resident") == 2


def test_the_command_fails_by_its_tolerance(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("soak", str(tiny_file), "-n", "8", "--tolerance", "nothing")
    assert done.returncode == 2
    assert "is no size" in done.stderr
