"""A short run of each target, guided by coverage, where its tools are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from martlet.scripts.fuzz import C_TARGETS, PYTHON_TARGETS

ROOT = Path(__file__).resolve().parents[2]
N_PYTHON, N_C = 300, 2000


def fuzz(*arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert " executions" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scripts/fuzz.py is for Linux")
@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_readers(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    fuzz(target, "--executions", str(N_PYTHON), "--found", str(tmp_path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scripts/fuzz.py is for Linux")
@pytest.mark.timeout(900)
def test_native_code(tmp_path: Path) -> None:
    fuzz(*C_TARGETS, "--executions", str(N_C), "--found", str(tmp_path))
