"""Samples of the sanitized runs: what hostile plans and steps reach, and ops between guard pages.
The rest takes minutes and is `python scripts/sanitize.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = {
    (): ("tests/runtime/test_native_refusals.py", "tests/runtime/test_native_hostile.py"),
    ("--guard",): ("tests/runtime/test_native.py", "-k", "every_op and Q4_K"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scripts/sanitize.py is for Linux")
@pytest.mark.parametrize("kind", SAMPLES, ids=" ".join)
@pytest.mark.timeout(900)
def test_nothing_else_is_touched(kind: tuple[str, ...]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), *kind]
    command += [*SAMPLES[kind], "-q", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
