"""Runs the fuzz targets of tests/fuzz, guided by what code each input reaches.

    python scripts/fuzz.py [TARGET ...] [--minutes N | --executions N] [--build FOLDER]
                           [--corpus FOLDER] [--found FOLDER] [--merge] [--list]

Each target runs for so long or so often, one after another, from its corpus. C targets need clang
and CMake, those in Python atheris (`pip install atheris`). Knows the tools and their reports; what
is right is the targets' own knowledge. Exit code 1: something was found, and its input kept; 2: a
tool is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "fuzz"
CORPUS = FOLDER / "corpus"
C_TARGETS = {"plan": 130, "pack": 600, "draw": 400}  # bytes of an input at most
NOT_TARGETS = frozenset(("__init__", "drive", "memory_file", "plan_cases", "write_seeds"))
PYTHON_TARGETS = tuple(
    sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if path.stem not in NOT_TARGETS and not path.stem.startswith("test_")
    )
)
TARGETS = (*C_TARGETS, *PYTHON_TARGETS)
HANG_S = 30  # of the clock: this machine may have other work
MEMORY_MB = 2048
ASAN = {
    # What no machine has is for our own checks to refuse; the fuzzer itself takes 20 MB at once.
    # An input takes little; freed memory that waits for 256 MB of its like costs a page fault each.
    "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=24:quarantine_size_mb=16",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class Missing(Exception):
    """One line: which tool this machine lacks. Exit code 2."""


class BuildFailed(Exception):
    """The output of the compiler. Exit code 1."""


@dataclass(frozen=True)
class Report:
    """What a run of one target came to."""

    target: str
    executions: int
    seconds: float
    coverage_before: int
    coverage_after: int
    found: list[Path]
    text: str

    def __str__(self) -> str:
        gained = f"{self.coverage_before} -> {self.coverage_after}"
        end = f"FOUND {', '.join(map(str, self.found))}" if self.found else "nothing found"
        rate = self.executions / max(self.seconds, 1)
        return (
            f"{self.target:16} {self.executions:>12,} executions  {rate:>9,.0f}/s  "
            f"coverage {gained:16} {end}"
        )


def read_report(target: str, text: str, found: list[Path]) -> Report:
    """Out of what libFuzzer prints: counts of edges after the corpus was read, and at the end."""
    coverage = [int(n) for n in re.findall(r"\bcov: (\d+)", text)]
    executions = re.findall(r"stat::number_of_executed_units: (\d+)", text)
    done = re.findall(r"Done (\d+) runs in (\d+) second", text)
    counted = [int(n) for n in re.findall(r"^#(\d+)\t", text, re.MULTILINE)]
    n = int(executions[-1]) if executions else int(done[-1][0]) if done else max(counted, default=0)
    seconds = float(done[-1][1]) if done else 0.0
    inited = re.search(r"INITED cov: (\d+)", text)
    before = int(inited[1]) if inited else 0
    return Report(target, n, seconds, before, max(coverage, default=0), found, text)


def find_clang() -> str:
    """Raises Missing without libFuzzer's runtime."""
    names = ("clang", *(f"clang-{version}" for version in range(21, 13, -1)))
    for path in filter(None, map(shutil.which, names)):
        command = [path, "-fsanitize=fuzzer,address", "-x", "c", "-", "-o", os.devnull]
        program = "int LLVMFuzzerTestOneInput(const char *d, long n) { return (int)(n * 0 * *d); }"
        if subprocess.run(command, input=program, capture_output=True, text=True).returncode == 0:
            return path
    raise Missing("no clang with libFuzzer: install clang and libclang-rt-dev for the C targets")


def build(targets: Sequence[str], folder: Path) -> None:
    """The C targets and the cases that plan.c spoils. Raises Missing, BuildFailed."""
    clang, cmake = find_clang(), shutil.which("cmake")
    if cmake is None:
        raise Missing("cmake is not installed; `pip install cmake` brings it")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [
        "-DMARTLET_FUZZ=ON",
        "-DMARTLET_SANITIZE=address,undefined",
        "-DCMAKE_BUILD_TYPE=None",
    ]
    programs = [f"fuzz_{target}" for target in targets]
    jobs = str(os.cpu_count() or 1)
    for command in (
        [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), *generator, *options],
        [cmake, "--build", str(folder), "--parallel", jobs, "--target", *programs],
        [sys.executable, "-m", "tests.fuzz.plan_cases", str(folder / "cases")],
    ):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "CC": clang},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise BuildFailed(f"{' '.join(command)} failed:\n{done.stdout}")


def command_of(target: str, build_folder: Path) -> list[str]:
    if target in C_TARGETS:
        return [str(build_folder / f"fuzz_{target}"), f"-max_len={C_TARGETS[target]}"]
    if importlib.util.find_spec("atheris") is None:
        raise Missing("atheris is not installed; `pip install atheris` brings it")
    source = (FOLDER / f"{target}.py").read_text()
    most = re.search(r"^MOST_BYTES = (\d+)", source, re.MULTILINE)
    return [
        sys.executable,
        "-m",
        "tests.fuzz.drive",
        target,
        f"-max_len={most[1] if most else 4096}",
    ]


def environ_of(build_folder: Path) -> dict[str, str]:
    return {**os.environ, **ASAN, "MARTLET_FUZZ_CASES": str(build_folder / "cases")}


def run_target(
    target: str,
    build_folder: Path,
    corpus: Path,
    found: Path,
    *,
    minutes: float | None,
    executions: int | None,
) -> Report:
    """New inputs go to corpus / target, those that crash or hang to found / target, and what the
    fuzzer says meanwhile to found / target.log."""
    new, crashes, kept = corpus / target, found / target, CORPUS / target
    for folder in (new, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    before = set(crashes.iterdir())
    limit = (
        [f"-runs={executions}"] if executions else [f"-max_total_time={int(60 * (minutes or 1))}"]
    )
    folders = [str(new), *([str(kept)] if kept.is_dir() else [])]
    options = [
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={crashes}/",
        "-print_final_stats=1",
    ]
    log = found / f"{target}.log"
    with log.open("wb") as said:
        done = subprocess.run(
            [*command_of(target, build_folder), *options, *limit, *folders],
            cwd=ROOT,
            env=environ_of(build_folder),
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    text = log.read_text(errors="replace")
    caught = sorted(set(crashes.iterdir()) - before)
    if done.returncode and not caught:
        raise BuildFailed(f"{target} did not run:\n{text[-4000:]}")
    return read_report(target, text, caught)


def merge(target: str, build_folder: Path, corpus: Path) -> str:
    """Adds to the corpus of the repository what reaches more than it does: the smallest of each."""
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    command = [*command_of(target, build_folder), "-merge=1", str(kept), str(corpus / target)]
    subprocess.run(command, cwd=ROOT, env=environ_of(build_folder), capture_output=True, check=True)
    files = list(kept.iterdir())
    return f"{target}: {len(files)} inputs of {sum(path.stat().st_size for path in files):,} bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for inputs that crash or hang martlet.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(TARGETS)}")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--minutes", type=float, help="for each target (1)")
    limit.add_argument("--executions", type=int, help="of each target")
    parser.add_argument("--build", type=Path, help="keep the build in this folder, for next time")
    parser.add_argument("--corpus", type=Path, help="keep new inputs here, for next time")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="what crashes")
    parser.add_argument("--merge", action="store_true", help="add what is new to tests/fuzz/corpus")
    parser.add_argument("--list", action="store_true", help="name the targets")
    args = parser.parse_args()
    if args.list:
        print("\n".join(TARGETS))
        return 0
    if unknown := sorted(set(args.targets) - set(TARGETS)):
        parser.error(f"{unknown[0]} is no target; there are {', '.join(TARGETS)}")
    targets = args.targets or list(TARGETS)
    with tempfile.TemporaryDirectory() as temporary:
        build_folder = (args.build or Path(temporary) / "build").resolve()
        corpus = (args.corpus or Path(temporary) / "corpus").resolve()
        n_found = 0
        try:
            if in_c := [target for target in targets if target in C_TARGETS]:
                build(in_c, build_folder)
            for target in targets:
                report = run_target(
                    target,
                    build_folder,
                    corpus,
                    args.found.resolve(),
                    minutes=args.minutes,
                    executions=args.executions,
                )
                print(report, flush=True)
                if report.found:
                    print(report.text[-6000:], flush=True)
                elif args.merge:
                    print(merge(target, build_folder, corpus), flush=True)
                n_found += len(report.found)
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BuildFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 1 if n_found else 0


if __name__ == "__main__":
    sys.exit(main())
