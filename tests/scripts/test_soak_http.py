"""`martlet soak URL`: many clients of a real server, and each thing it watches for fails it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from martlet.scripts.soak_http import Heard, HttpSoak

from ..server.scripted_engine import ScriptedEngine, says
from ..server.serving import serving
from .conftest import Martlet


@pytest.fixture
def address(tiny_file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "martlet.scripts.cli", "serve", str(tiny_file), "--port", "0"]
    # Room for a few requests: the clients wait for each other, and push each other's blocks out.
    sizes = ("--context", "1152", "--kv-bytes", "400K")
    with subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        yield child.stdout.readline().split()[2].removesuffix("/v1/chat/completions")
        child.kill()


def test_clients_that_leave_take_nothing_from_others(martlet: Martlet, address: str) -> None:
    limits = ("--health-ms", "5000")  # other tests may run beside this one
    done = martlet("soak", address, "-n", "128", "--clients", "64", *limits)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout


def shortly(engine: ScriptedEngine) -> HttpSoak:
    with serving(engine) as client:
        run = HttpSoak(client.base_url.netloc.decode(), n_clients=8, seed=1, silent_s=5)
        run.serve(24)
    return run


def test_an_answer_that_ends_early_or_never_is_lost() -> None:
    run = shortly(ScriptedEngine(says("short"), slots=8))
    assert run.lost
    assert "end length after 6 tokens" in "\n".join(run.faults(1 << 30, 1e4))


def test_an_error_within_a_stream_is_told() -> None:
    run = shortly(ScriptedEngine(says("", end=False), slots=8, fail_at=3))
    assert "scripted fault" in "\n".join(run.faults(1 << 30, 1e4))


def test_what_differs_is_held_grows_or_is_slow_is_a_fault() -> None:
    run = HttpSoak("", n_clients=1, seed=0)
    run.heard = [Heard(3, "one", True), Heard(3, "on", False), Heard(4, "two", True)]
    run.sizes, run.health_ms = [10, 12], [1.0] * 98 + [300.0] * 2
    assert run.faults(2, 300) == []
    run.heard += [Heard(3, "x", False), Heard(4, "too", True)]
    run.left_over, run.sizes = {"running": 1}, [10, 13]
    shown = "\n".join(run.faults(2, 200))
    for expected in ("question 3", "question 4", "'running': 1", "grew by", "p99 of /health"):
        assert expected in shown
