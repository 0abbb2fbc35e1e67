"""A sample of the emulated CPUs: every block format and some ops, on one CPU of each kind. It takes
minutes, so it is run where MARTLET_EMULATE is set, as CI does; the rest is
`python scripts/emulate.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not os.environ.get("MARTLET_EMULATE"), reason="MARTLET_EMULATE is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cpus", ["kvm64,Penryn,SandyBridge", "cortex-a53,cortex-a76,max"])
def test_emulated_cpus_give_the_bits_of_the_scalar_kernels(cpus: str) -> None:
    script = [str(ROOT / "scripts" / "emulate.py"), "--short", "--only", cpus]
    command = [sys.executable, "-X", "martlet-entered", *script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    if done.returncode == 2:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 failed, 0 skipped" in done.stdout
