"""How the native library sits in a process: no wide instruction in code that every machine runs,
more threads than CPUs, and no CPU used while idle."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from martlet.runtime.executors.native import NativeExecutor

from .native_library import IS_SANITIZED
from .tiny import TinyDims, run_tokens, tiny_model

CSRC = Path(__file__).parents[2] / "csrc"
MOST_SLOWDOWN = 20  # B114: of sixteen threads on one CPU, against one thread there
IDLE_SHARE = 0.02  # B116: of one CPU


# -- B112 ---------------------------------------------------------------------------------------

# In 64-bit code these bytes open a VEX or EVEX instruction and nothing else; only prefixes for
# segment and address size may stand before them.
WIDE_OPENINGS = {"c4", "c5", "62"}
PREFIXES = {"26", "2e", "36", "3e", "64", "65", "67"}


def wide_instructions(listing: str) -> Iterator[str]:
    """Lines of `objdump -d` that hold a VEX or EVEX encoding (AVX and later, BMI as well)."""
    for line in listing.splitlines():
        fields = line.split("\t")
        if len(fields) < 3:  # a label, or the rest of a long instruction's bytes
            continue
        opening = [byte for byte in fields[1].split() if byte not in PREFIXES]
        if opening and opening[0] in WIDE_OPENINGS:
            yield line.strip()


def disassembled(command: list[str], folder: Path) -> str:
    """Compiles with the build's own command, but into the folder."""
    done = subprocess.run(
        [*command, "-o", str(folder / "object.o")], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    listing = ["objdump", "-d", str(folder / "object.o")]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def compile_commands(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """By (source file, ISA of the kernels or "" for the rest), as CMake would compile them."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only x86-64 has encodings to look for")
    if cmake is None or shutil.which("objdump") is None:
        pytest.skip("needs cmake (pip install cmake) and objdump (binutils)")
    folder = tmp_path_factory.mktemp("commands")
    configure = [cmake, "-S", str(CSRC), "-B", str(folder), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    done = subprocess.run(configure, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cmake finds no compiler here: {done.stderr.strip().splitlines()[-1:]}")
    commands = {}
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        at = words.index("-o")
        isa = next((w.removeprefix("-DMT_ISA=") for w in words if w.startswith("-DMT_ISA=")), "")
        commands[Path(entry["file"]).name, isa] = words[:at] + words[at + 2 :]
    return commands


def test_baseline_code_has_no_wide_instruction(
    compile_commands: dict[tuple[str, str], list[str]], tmp_path: Path
) -> None:
    baseline = [key for key in compile_commands if key[1] in ("", "scalar")]
    assert ("kernels.c", "scalar") in baseline
    assert ("engine.c", "") in baseline
    for key in baseline:
        found = list(wide_instructions(disassembled(compile_commands[key], tmp_path)))
        assert not found, (key, found[:3])


def test_the_scan_sees_wide_instructions(
    compile_commands: dict[tuple[str, str], list[str]], tmp_path: Path
) -> None:
    for isa in ("avx2", "avx512"):
        command = compile_commands["limits_isa.c", isa]
        assert list(wide_instructions(disassembled(command, tmp_path)))


# -- B114 ---------------------------------------------------------------------------------------

# Prints the seconds of 20 tokens with each number of threads, the best of three, on one CPU.
ON_ONE_CPU = """
import json, os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.runtime.test_native_process import twenty_tokens
print(json.dumps([min(twenty_tokens(n) for _ in range(3)) for n in (1, 2, 4, 16)]))
"""


def twenty_tokens(n_threads: int) -> float:
    dims = TinyDims(dim=256, ffn_dim=1024, n_layers=3, vocab_size=1000)
    model = tiny_model(formats=("Q4_0",), dims=dims)
    executor = NativeExecutor(model.plan(8), model.weights, n_blocks=4, n_threads=n_threads)
    start = time.perf_counter()
    run_tokens(executor, range(20), chunk=1)
    elapsed_s = time.perf_counter() - start
    executor.close()
    return elapsed_s


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no CPU masks")
def test_more_threads_than_cpus_finish() -> None:
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE_CPU],
        capture_output=True,
        text=True,
        cwd=root,
        env=environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    alone, *crowded = json.loads(done.stdout)
    assert max(crowded) <= MOST_SLOWDOWN * alone, (alone, crowded)


# -- B116 ---------------------------------------------------------------------------------------


@pytest.mark.skipif(IS_SANITIZED, reason="the sanitizer's own threads count")
def test_idle_threads_use_no_cpu() -> None:
    """Before any step, and after one."""
    model = tiny_model(dims=TinyDims(dim=64, ffn_dim=64, head_dim=16, n_layers=1, vocab_size=40))
    executor = NativeExecutor(model.plan(8), model.weights, n_blocks=4, n_threads=4)
    try:
        for _ in range(2):
            time.sleep(0.2)
            start, cpu = time.perf_counter(), time.process_time()
            time.sleep(1.5)
            used = (time.process_time() - cpu) / (time.perf_counter() - start)
            assert used < IDLE_SHARE
            run_tokens(executor, [1, 2, 3])
    finally:
        executor.close()
