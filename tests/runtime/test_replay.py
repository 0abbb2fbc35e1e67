"""What native tests hand to C runs without Python as well, and a bit that differs is told."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from martlet.runtime.executors.native_library import library_path

from .native_library import ISAS, LIBRARY
from .op_cases import OP_CASES
from .record_cases import HEAD, ScalarExecutor, recorded

ROOT = Path(__file__).resolve().parents[2]
LOGITS = LIBRARY.ffi.offsetof("mt_step", "logits")
OPS = ("linear", "attention", "rope_kv", "experts", "scan")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.name == "nt":
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("replay") / "replay"
    source = str(ROOT / "csrc" / "replay.c")
    subprocess.run([compiler, "-std=gnu11", source, "-o", str(path), "-ldl"], check=True)
    return path


def replay(program: Path, case: Path) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(library_path()), str(case)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("op", OPS)
def test_every_isa_replays_a_case_and_tells_a_changed_bit(
    program: Path, tmp_path: Path, op: str
) -> None:
    case = next(case for case in OP_CASES if case.name.startswith(op))
    recording = recorded(lambda: case.run(ScalarExecutor))
    path = tmp_path / "op.case"
    recording.write(path, LIBRARY.lib.mt_abi_version())
    done = replay(program, path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ISAS)} of {len(ISAS)} alike" in done.stdout

    data = bytearray(path.read_bytes())
    steps = struct.unpack_from(HEAD, data)[-1]
    (place,) = struct.unpack_from("<q", data, steps + LOGITS)
    data[place] ^= 1  # the last bit of the first number that came out
    path.write_bytes(data)
    done = replay(program, path)
    assert done.returncode == 1
    assert "step 0, row 0, column 0" in done.stdout
    assert f"0 of {len(ISAS)} alike" in done.stdout


def test_a_case_of_another_interface_or_cut_short_is_refused(program: Path, tmp_path: Path) -> None:
    case = next(case for case in OP_CASES if case.name.startswith("add"))
    path = tmp_path / "op.case"
    recorded(lambda: case.run(ScalarExecutor)).write(path, 1)
    done = replay(program, path)
    assert done.returncode == 2
    assert "interface 1" in done.stderr
    path.write_bytes(path.read_bytes()[:-1])
    assert replay(program, path).returncode == 2
