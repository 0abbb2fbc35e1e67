"""What can be told of wheels without building one, which takes minutes each."""

import subprocess
import sys
from pathlib import Path

import pytest
from martlet.scripts.build_wheels import TARGETS, Target, covers, without_requirements

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "build_wheels.py")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.tag)
def test_a_tag_promises_the_system_and_the_libc_that_zig_aims_at(target: Target) -> None:
    machine, libc = target.zig.split("-linux-")
    assert target.tag.endswith(machine)
    assert target.linux_tag == f"linux_{machine}"
    kind, *version = libc.split(".")
    many = "_".join(["manylinux", *version]) if kind == "gnu" else "musllinux"
    assert target.tag.startswith(many)


def test_an_unknown_platform_is_refused_with_those_there_are() -> None:
    command = [sys.executable, SCRIPT, "--only", "manylinux_9_x86_64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such platform: manylinux_9_x86_64" in done.stderr
    assert "musllinux_1_2_aarch64" in done.stderr


@pytest.mark.parametrize(
    ("found", "is_covered"),
    [
        ("m-1-py3-none-manylinux_2_27_aarch64.whl", True),
        ("m-1-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", True),
        ("m-1-py3-none-manylinux_2_28_aarch64.whl", True),
        ("m-1-py3-none-manylinux_2_34_aarch64.whl", False),
        ("m-1-py3-none-manylinux_2_27_x86_64.whl", False),
        ("m-1-py3-none-musllinux_1_2_aarch64.whl", False),
        ("m-1-py3-none-linux_aarch64.whl", False),
    ],
)
def test_a_wheel_promises_no_more_than_was_found(found: str, is_covered: bool) -> None:
    assert covers(found, "manylinux_2_28_aarch64") is is_covered


def test_requirements_are_left_out_by_name() -> None:
    metadata = (
        "Requires-Dist: cffi>=1.15\n"
        "Requires-Dist: numba>=0.61\n"
        "Requires-Dist: numba-scipy\n"
        "Requires-Dist: llguidance>=1.7; platform_machine in 'x86_64'\n"
        'Requires-Dist: llguidance>=1.7; extra == "structured"\n'
        "\nnumba is what this text is about\n"
    )
    assert without_requirements(metadata, ("llguidance", "numba")) == (
        "Requires-Dist: cffi>=1.15\n"
        "Requires-Dist: numba-scipy\n"
        'Requires-Dist: llguidance>=1.7; extra == "structured"\n'
        "\nnumba is what this text is about\n"
    )
