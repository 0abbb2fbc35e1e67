"""Builds the C code with sanitizers and runs its tests under them, on Linux with gcc and CMake.

    python scripts/sanitize.py [--thread | --guard] [--build FOLDER] [pytest arguments]

Addresses and undefined behaviour by default; --thread looks for data races. --guard lays each
buffer against pages that may not be touched, first at its end and then at its start, with kernels
as they are shipped. The first finding ends the run, with its stack where a sanitizer found it.
Knows the build and the runtimes; the tests know nothing of it but that they may be slow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, Missing, exit_code, find, run  # type: ignore[import-not-found]

MOST_S = 3600  # of one test: checked code may be fifty times slower, and the machine busy


@dataclass(frozen=True)
class Sanitizer:
    """How CMake is asked for it, the runtime that must be in the process before Python is ("":
    none), and what is in the environment of each run of the tests."""

    option: str
    runtime: str
    environs: tuple[dict[str, str], ...]


SANITIZERS = {
    "address": Sanitizer(
        "-DMARTLET_SANITIZE=address,undefined",
        "libasan.so",
        # Python keeps its memory to the end; a size no machine has is for our own check to refuse.
        (
            {
                "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
            },
        ),
    ),
    # Python and NumPy are not compiled for it, so only what the library does counts.
    "thread": Sanitizer(
        "-DMARTLET_SANITIZE=thread",
        "libtsan.so",
        ({"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"},),
    ),
    "guard": Sanitizer(
        "-DMARTLET_GUARD=ON", "", ({"MARTLET_GUARD": "end"}, {"MARTLET_GUARD": "start"})
    ),
}


def find_runtime(sanitizer: Sanitizer) -> str:
    """gcc answers with the bare name where it has no such file, and so does clang."""
    if not sanitizer.runtime:
        return ""
    compiler = find(os.environ.get("CC", "cc"), "gcc")
    command = [compiler, f"-print-file-name={sanitizer.runtime}"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        raise Missing(f"{compiler} has no {sanitizer.runtime}; use gcc with CC=gcc")
    return path


def build(sanitizer: Sanitizer, folder: Path) -> Path:
    """The library; martlet.h is laid beside it, where the executor looks for it."""
    cmake = find("cmake", "`pip install cmake`")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    made, jobs = str(folder / "build"), str(os.cpu_count() or 1)
    run(cmake, "-S", str(ROOT / "csrc"), "-B", made, sanitizer.option, *generator)
    run(cmake, "--build", made, "--parallel", jobs)
    run(cmake, "--install", made, "--prefix", str(folder))
    return next(folder.glob("martlet/**/libmartlet.so"))


def run_tests(sanitizer: Sanitizer, library: Path, arguments: list[str]) -> int:
    """One after another with each environment; the code of the first run that fails."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"timeout={MOST_S}"]
    command += arguments
    common = {"MARTLET_LIBRARY": str(library), "MARTLET_SANITIZED": "1"}
    if runtime := find_runtime(sanitizer):
        common["LD_PRELOAD"] = runtime
    for environ in sanitizer.environs:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ, **common})
        if done.returncode:
            return done.returncode
    return 0


def native_tests() -> list[str]:
    return [str(path) for path in sorted((ROOT / "tests" / "runtime").glob("test_native*.py"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the native tests under sanitizers.")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--thread", action="store_true", help="data races instead of memory")
    kind.add_argument("--guard", action="store_true", help="buffers against guard pages")
    parser.add_argument("--build", type=Path, help="keep the build in this folder, for next time")
    args, pytest_arguments = parser.parse_known_args()
    sanitizer = SANITIZERS["thread" if args.thread else "guard" if args.guard else "address"]

    def work() -> int:
        with tempfile.TemporaryDirectory() as temporary:
            find_runtime(sanitizer)  # before what takes minutes
            library = build(sanitizer, args.build or Path(temporary))
            return run_tests(sanitizer, library, pytest_arguments or [*native_tests(), "-q", "-x"])

    return int(exit_code(work))


if __name__ == "__main__":
    sys.exit(main())
