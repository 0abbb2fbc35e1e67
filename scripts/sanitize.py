"""Builds the C code with sanitizers and runs its tests under them, on Linux with gcc and CMake.

    python scripts/sanitize.py [--thread] [--build FOLDER] [pytest arguments]

Addresses and undefined behaviour by default; --thread looks for data races. The first finding ends
the run with its stack. Knows the build and the runtimes; the tests know nothing of it but that
they may be slow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sanitizer:
    """What -fsanitize= is given, and the runtime that must be in the process before Python is."""

    flags: str
    runtime: str
    environ: dict[str, str] = field(default_factory=dict)


SANITIZERS = {
    "address": Sanitizer(
        "address,undefined",
        "libasan.so",
        # Python keeps its memory to the end; a size no machine has is for our own check to refuse.
        {
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    # Python and NumPy are not compiled for it, so only what the library does counts.
    "thread": Sanitizer(
        "thread", "libtsan.so", {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"}
    ),
}


class Missing(Exception):
    """One line: what this machine lacks for a sanitized run. Exit code 2."""


class BuildFailed(Exception):
    """The output of the compiler. Exit code 1, as for a test that fails."""


def find_program(name: str) -> str:
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise Missing(f"{name} is not installed; `pip install {name}` brings it")
    return found


def find_runtime(sanitizer: Sanitizer) -> str:
    """gcc answers with the bare name where it has no such file, and so does clang."""
    compiler = find_program(os.environ.get("CC", "cc"))
    command = [compiler, f"-print-file-name={sanitizer.runtime}"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        raise Missing(f"{compiler} has no {sanitizer.runtime}; use gcc with CC=gcc")
    return path


def build(sanitizer: Sanitizer, folder: Path) -> Path:
    """The library; martlet.h is laid beside it, where the executor looks for it."""
    cmake = find_program("cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-DMARTLET_SANITIZE={sanitizer.flags}", *generator]
    for command in (
        [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder / "build"), *options],
        [cmake, "--build", str(folder / "build"), "--parallel", str(os.cpu_count() or 1)],
        [cmake, "--install", str(folder / "build"), "--prefix", str(folder)],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise BuildFailed(f"{' '.join(command)} failed:\n{done.stdout}")
    return next(folder.glob("martlet/**/libmartlet.so"))


def run_tests(sanitizer: Sanitizer, library: Path, arguments: list[str]) -> int:
    environ = {
        **os.environ,
        **sanitizer.environ,
        "LD_PRELOAD": find_runtime(sanitizer),
        "MARTLET_LIBRARY": str(library),
        "MARTLET_SANITIZED": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


def native_tests() -> list[str]:
    return [str(path) for path in sorted((ROOT / "tests" / "runtime").glob("test_native*.py"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the native tests under sanitizers.")
    parser.add_argument("--thread", action="store_true", help="data races instead of memory")
    parser.add_argument("--build", type=Path, help="keep the build in this folder, for next time")
    args, pytest_arguments = parser.parse_known_args()
    sanitizer = SANITIZERS["thread" if args.thread else "address"]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            find_runtime(sanitizer)
            library = build(sanitizer, args.build or Path(temporary))
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BuildFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return run_tests(sanitizer, library, pytest_arguments or [*native_tests(), "-q", "-x"])


if __name__ == "__main__":
    sys.exit(main())
