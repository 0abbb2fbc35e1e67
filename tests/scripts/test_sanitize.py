"""A sample of the sanitized run: what hostile plans and steps reach. The rest takes minutes and is
`python scripts/sanitize.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ("test_native_refusals.py", "test_native_hostile.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scripts/sanitize.py is for Linux")
def test_refused_plans_and_steps_touch_nothing_else() -> None:
    files = [str(ROOT / "tests" / "runtime" / name) for name in SAMPLE]
    command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), *files, "-q", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
