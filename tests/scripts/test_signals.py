"""A command that is ended while it writes leaves nothing behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = """
import signal, sys
from pathlib import Path
from martlet.quant.whole_file import whole_or_nothing
from martlet.scripts.console import unwound_by_signals
number = int(sys.argv[2])
if sys.argv[3] == "ignored":
    signal.signal(number, signal.SIG_IGN)
with unwound_by_signals(), whole_or_nothing(Path(sys.argv[1])) as file:
    file.write(b"half")
    signal.raise_signal(number)
"""


def write(out: Path, number: int, how: str) -> int:
    command = [sys.executable, "-c", WRITER, str(out), str(int(number)), how]
    return subprocess.run(command, timeout=60).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_and_leaves_no_part_of_a_file(
    tmp_path: Path, number: int
) -> None:
    assert write(tmp_path / "out", number, "default") == -number
    assert list(tmp_path.iterdir()) == []
    assert write(tmp_path / "out", number, "ignored") == 0
    assert (tmp_path / "out").read_bytes() == b"half"
