"""Runs the C code on emulated CPUs, x86-64 and 64-bit ARM, without Python on the other side.

    python scripts/emulate.py [--short] [--only cortex-a53,Penryn] [--build FOLDER]

What the native tests hand to C is recorded here and replayed there (csrc/replay.c) on every kernel
table that the CPU offers; each must give the bits that the scalar kernels give here. Wants
qemu-user-static, a C compiler, and for ARM gcc-aarch64-linux-gnu and libc6-dev-arm64-cross. A CPU
for which something is not installed is skipped, and the last line counts those. Exit code: 1 if a
bit differs, 2 if nothing ran. Must not know: what is recorded, which kernels there are.
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

from emulate_arm import COMPILER, EMULATOR, Failed, build, run  # type: ignore[import-not-found]
from environment import enter  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")


@dataclass(frozen=True)
class Machine:
    """A CPU as qemu names it, and what its best kernels use."""

    cpu: str
    is_arm: bool
    what: str


MACHINES = (
    Machine("kvm64", False, "neither SSSE3 nor SSE4.1"),
    Machine("Penryn", False, "SSE4.1"),
    Machine("SandyBridge", False, "AVX, but not AVX2"),
    Machine("Haswell", False, "AVX2"),
    Machine("cortex-a53", True, "NEON"),
    Machine("cortex-a72", True, "NEON"),
    Machine("cortex-a76", True, "the dot product"),
    Machine("max", True, "the dot product of mixed signs"),
)


def wanted_programs(machine: Machine) -> list[str]:
    if machine.is_arm:
        return [COMPILER, EMULATOR, "cmake"]
    return [os.environ.get("CC", "cc"), "qemu-x86_64-static"]


def lacking(machine: Machine) -> str | None:
    for program in wanted_programs(machine):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if machine.is_arm and not ARM_LIBRARIES.is_dir():
        return f"{ARM_LIBRARIES} is not there; libc6-dev-arm64-cross brings it"
    return None


class Builds:
    """The library and the program that replays, for either kind of CPU, built when first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[bool, tuple[Path, Path]] = {}

    def of(self, machine: Machine) -> tuple[Path, Path]:
        if machine.is_arm not in self.done:
            self.done[machine.is_arm] = self._build(machine)
        return self.done[machine.is_arm]

    def _build(self, machine: Machine) -> tuple[Path, Path]:
        program = self.folder / ("replay-arm" if machine.is_arm else "replay")
        compiler = wanted_programs(machine)[0]
        source = str(ROOT / "csrc" / "replay.c")
        run(compiler, "-std=gnu11", "-O1", source, "-o", str(program), "-ldl")
        if machine.is_arm:
            return build(self.folder / "arm"), program
        from martlet.runtime.executors.native import library_path

        return library_path(), program


def replay(machine: Machine, builds: Builds, cases: list[str]) -> None:
    library, program = builds.of(machine)
    emulator = [EMULATOR, "-L", str(ARM_LIBRARIES)] if machine.is_arm else ["qemu-x86_64-static"]
    said = run(*emulator, "-cpu", machine.cpu, str(program), str(library), *cases)
    print(f"{machine.cpu} ({machine.what}): {said.strip()}", flush=True)


def main() -> int:
    enter(__file__, ("test",), native_must_build=True)
    names = [machine.cpu for machine in MACHINES]
    parser = argparse.ArgumentParser(description="Run the C code on emulated CPUs.")
    parser.add_argument("--short", action="store_true", help="a sample, in minutes")
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--build", type=Path, help="keep everything in this folder, for next time")
    args = parser.parse_args()
    machines = [machine for machine in MACHINES if machine.cpu in args.only.split(",")]
    skipped, failed = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        shutil.rmtree(folder / "cases", ignore_errors=True)  # of another interface, maybe
        cases = folder / "cases"
        option = ["--short"] if args.short else []
        record = [sys.executable, "-m", "tests.runtime.record_cases", str(cases), *option]
        subprocess.run(record, cwd=ROOT, check=True)
        paths = sorted(map(str, cases.glob("*.case")))
        builds = Builds(folder)
        for machine in machines:
            if reason := lacking(machine):
                print(f"SKIPPED {machine.cpu}: {reason}", flush=True)
                skipped.append(machine.cpu)
                continue
            try:
                replay(machine, builds, paths)
            except Failed as error:
                print(f"FAILED {machine.cpu}: {error}", flush=True)
                failed.append(machine.cpu)
    n_ran = len(machines) - len(skipped)
    print(f"emulated: {n_ran} CPUs ran, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed else 0 if n_ran else 2


if __name__ == "__main__":
    sys.exit(main())
