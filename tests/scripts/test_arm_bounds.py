"""Loops are found in assembly as compilers write it."""

import subprocess
import sys
from pathlib import Path

import pytest
from martlet.scripts.arm_bounds import body_of, functions, hot_loop, multiply_adds

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "arm_bounds.py")

ASSEMBLY = """
\t.type\tmm_b8_4, %function
mm_b8_4:
.LFB7:
\t.cfi_startproc
\tcbz\tw1, .L9
.L3:
\tldr\tq0, [x3]
.L4:
\tprfm\tPLDL2KEEP, [x0]
\tcmp\tx1, x0
\tbhi\t.L4
\tsdot\tv5.4s, v0.16b, v30.4b[0] // a comment
\tsdot\tv6.4s, v0.16b, v30.4b[1]
\tsubs\tw1, w1, #1
\tb.ne\t.L3
\tadd\tw5, w5, 1
\tcbnz\tw5, .L3
.L9:
\tret
\t.size\tmm_b8_4, .-mm_b8_4
mm_b128_4:
\tb\tmm_b8_4
"""


def test_the_innermost_loop_with_products_is_taken() -> None:
    found = functions(ASSEMBLY)
    loop = hot_loop(found["mm_b8_4"], at_a_time=32)
    assert loop[0] == ".L3:"
    assert loop[-1].split() == ["b.ne", ".L3"]
    assert multiply_adds(loop) == 32


def test_equal_functions_have_one_body() -> None:
    found = functions(ASSEMBLY)
    assert body_of(found, "mm_b128_4") == found["mm_b8_4"]


@pytest.mark.parametrize(
    ("instruction", "products"),
    [
        ("smlal2\tv1.8h, v2.16b, v3.16b", 8),
        ("smull\tx0, w1, w2", 0),  # of numbers in general registers
        ("smull\tv1.4s, v2.4h, v3.4h", 0),
        ("usdot\tv1.4s, v2.16b, v3.4b[1]", 16),
        ("smmla\tv1.4s, v2.16b, v3.16b", 32),
        ("fmla\tv1.4s, v2.4s, v3.4s", 0),
    ],
)
def test_products_of_bytes_are_counted(instruction: str, products: int) -> None:
    assert multiply_adds([instruction]) == products


@pytest.mark.parametrize("version", ["14.0.6", "unknown"])
def test_an_llvm_that_would_calculate_other_figures_is_refused(
    tmp_path: Path, version: str
) -> None:
    mca = tmp_path / "llvm-mca"
    mca.write_text(f"#!/bin/sh\necho Debian LLVM version {version}\n")
    mca.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--mca", str(mca)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "17 or newer is needed" in done.stderr
