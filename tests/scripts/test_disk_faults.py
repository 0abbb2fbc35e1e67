"""Writers that are killed, or whose disk is full or fails: what has a name is whole, and the next
run works and tidies up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.platform == "win32":
    pytest.skip("has no fork", allow_module_level=True)

from .writers import BAD_BLOCK, BLOCKS, OUT

ROOT = Path(__file__).parents[2]
KILLED, BY_TIMER = -9, -26
REFUSED = {"too-large": "File too large", "full": "No space left", "failing": "Input/output error"}


class Run(NamedTuple):
    code: int
    files: dict[str, str]


class Runs(NamedTuple):
    faulty: list[Run]
    last: Run
    """Without a fault."""


class Told(NamedTuple):
    by_fault: dict[str, Runs]
    stderr: str

    def of(self, fault: str) -> Runs:
        runs = self.by_fault[fault]
        if not runs.faulty:
            pytest.skip("no right to mount a small disk")
        return runs


def all_runs(writer: str, folder: Path, model: Path) -> Told:
    command = [sys.executable, "-m", "tests.scripts.writers", writer, str(folder), str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Run]] = {}
    for fault, code, files in map(json.loads, done.stdout.splitlines()):
        found.setdefault(fault, []).append(Run(code, files))
    return Told({fault: Runs(runs[:-1], runs[-1]) for fault, runs in found.items()}, done.stderr)


@pytest.fixture(scope="module", params=["convert", "quantize", "pull"])
def told(
    request: pytest.FixtureRequest, tiny_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Told:
    return all_runs(request.param, tmp_path_factory.mktemp(request.param), tiny_file)


def check_whole(runs: Runs) -> None:
    """Never half a file under its name; in the end nothing but the file."""
    assert runs.last.code == 0
    assert list(runs.last.files) == [OUT]
    for _, between in runs.faulty:
        assert between.get(OUT, runs.last.files[OUT]) == runs.last.files[OUT]


def test_killed_at_each_touch_of_a_file_and_begun_again(told: Told) -> None:
    runs = told.of("killed")
    codes = [run.code for run in runs.faulty]
    assert codes == [KILLED] * (len(codes) - 1) + [0]
    assert len(codes) > 4
    check_whole(runs)


def test_killed_at_any_time_and_begun_again(told: Told) -> None:
    runs = told.of("killed-sometime")
    assert {run.code for run in runs.faulty} <= {BY_TIMER, 0}  # some are done before
    check_whole(runs)


@pytest.mark.parametrize("fault", REFUSED)
def test_a_disk_that_refuses_is_told_in_words_and_nothing_stays(told: Told, fault: str) -> None:
    runs = told.of(fault)
    check_whole(runs)
    refused = [run.files for run in runs.faulty if run.code]
    assert refused
    assert not any(refused), "half a file"
    assert REFUSED[fault] in told.stderr
    assert "Traceback" not in told.stderr


def test_a_prefix_cache_outlives_kills_and_disks_that_refuse(
    tiny_file: Path, tmp_path: Path
) -> None:
    told = all_runs("prefixes", tmp_path, tiny_file)
    for fault, runs in told.by_fault.items():
        codes = [run.code for run in runs.faulty]
        assert BAD_BLOCK not in codes
        assert runs.last.code == 0, told.stderr
        assert sorted(runs.last.files) == [f"{digest.hex()}.kv" for digest in sorted(BLOCKS)]
        if fault in REFUSED:
            assert codes == [0] * len(codes), "a cache is a convenience"
        elif fault == "killed":
            assert codes == [KILLED] * (len(codes) - 1) + [0]
