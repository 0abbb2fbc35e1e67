"""A command that is ended while it writes leaves nothing behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..quant.checkpoints import RECORDED

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


# The signal comes when all is written and the file has not its name yet.
COMMAND = """
import os, sys
from martlet.scripts.cli import main
number, sync = int(sys.argv[1]), os.fsync
def interrupted(handle):
    os.kill(os.getpid(), number)
    sync(handle)
os.fsync = interrupted
main(sys.argv[2:])
"""


def arguments(command: str, model: Path, text: Path, out: Path) -> list[str]:
    given = {
        "convert": [str(RECORDED / "llama"), str(out)],
        "quantize": [str(model), str(out), "--type", "Q8_0"],
        "synthesize": ["smollm2-135m", str(out), "--layers", "1", "--vocab-size", "300"],
        "imatrix": [str(model), "-f", str(text), "-o", str(out), "-c", "16"],
        "kld": [str(model), "-f", str(text), "--save-base", str(out), "-c", "16"],
    }
    return [command, *given[command]]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["convert", "quantize", "synthesize", "imatrix", "kld"])
def test_a_command_that_is_ended_leaves_no_part_of_a_file(
    tiny_file: Path, tmp_path: Path, command: str, number: int
) -> None:
    text, out = tmp_path / "text", tmp_path / "new" / "out"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    given = arguments(command, tiny_file, text, out)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(int(number)), *given],
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (130 if number == signal.SIGINT else -number), done.stderr
    assert list(out.parent.iterdir()) == []
