"""What is refused before a wheel is installed; trying one takes minutes and a model."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "try_wheel.py")


def try_wheel(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--model", "none.gguf", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_wheel_for_musl_needs_a_python_for_musl() -> None:
    done = try_wheel("m-1-py3-none-musllinux_1_2_x86_64.whl")
    assert done.returncode == 2
    assert "--musl-root" in done.stderr


def test_a_root_without_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.11-config").touch()
    done = try_wheel("--musl-root", str(tmp_path), "m-1-py3-none-musllinux_1_2_x86_64.whl")
    assert done.returncode == 2
    assert f"{tmp_path} has no usr/bin/python3.*" in done.stderr


def test_a_wheel_of_another_machine_is_refused() -> None:
    done = try_wheel("m-1-py3-none-manylinux_2_28_ppc64le.whl")
    assert done.returncode == 2
    assert "is for ppc64le" in done.stderr
