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
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from environment import enter  # type: ignore[import-not-found]
from programs import ROOT, Failed, exit_code, run  # type: ignore[import-not-found]

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
TOOLCHAIN = ROOT / "csrc" / "toolchains" / "aarch64-linux-gnu.cmake"
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")


@dataclass(frozen=True)
class Machine:
    """A CPU as qemu names it, and what its best kernels use."""

    cpu: str
    is_arm: bool
    what: str
    in_sample: bool = True


# None with AVX2: qemu 7.2 gives zeros in some products there, which processors get right. The tests
# themselves run on one of these.
MACHINES = (
    Machine("kvm64", False, "neither SSSE3 nor SSE4.1"),
    Machine("Penryn", False, "SSE4.1"),
    Machine("SandyBridge", False, "AVX, but not AVX2"),
    Machine("cortex-a53", True, "NEON"),
    Machine("cortex-a72", True, "NEON", in_sample=False),
    Machine("cortex-a76", True, "the dot product"),
    Machine("max", True, "products of matrices (i8mm)"),
)


def wanted_programs(machine: Machine) -> list[str]:
    if machine.is_arm:
        return [COMPILER, EMULATOR, "cmake"]
    return [os.environ.get("CC", "cc"), "qemu-x86_64-static"]


def lacking(machine: Machine) -> str | None:
    if not machine.is_arm and platform.machine() not in ("x86_64", "AMD64"):
        return f"the library here is for {platform.machine()}"
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
            return build_for_arm(self.folder / "arm"), program
        from martlet.runtime.executors.native_library import library_path

        return library_path(), program


def build_for_arm(folder: Path) -> Path:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["--toolchain", str(TOOLCHAIN), "-DMARTLET_WERROR=ON", *generator]
    run("cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *options)
    run("cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1))
    return folder / "libmartlet.so"


def replay(machine: Machine, library: Path, program: Path, cases: list[str]) -> str:
    """The line that tells what ran; qemu's warnings of what it lacks stand before it."""
    emulator = [EMULATOR, "-L", str(ARM_LIBRARIES)] if machine.is_arm else ["qemu-x86_64-static"]
    said: str = run(*emulator, "-cpu", machine.cpu, str(program), str(library), *cases)
    return f"{machine.cpu} ({machine.what}): {said.splitlines()[-1]}"


def record(folder: Path, short: bool) -> list[str]:
    shutil.rmtree(folder, ignore_errors=True)  # of another interface, maybe
    option = ["--short"] if short else []
    print(run(sys.executable, "-m", "tests.runtime.record_cases", str(folder), *option), end="")
    return sorted(map(str, folder.glob("*.case")))


def emulate(machines: list[Machine], folder: Path, short: bool) -> int:
    reasons = {machine.cpu: lacking(machine) for machine in machines}
    for cpu, reason in reasons.items():
        if reason:
            print(f"SKIPPED {cpu}: {reason}", flush=True)
    able = [machine for machine in machines if not reasons[machine.cpu]]
    cases = record(folder / "cases", short) if able else []
    builds, n_failed = Builds(folder), 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = {m.cpu: pool.submit(replay, m, *builds.of(m), cases) for m in able}
        for cpu, job in jobs.items():
            try:
                print(job.result(), flush=True)
            except Failed as error:
                print(f"FAILED {cpu}: {error}", flush=True)
                n_failed += 1
    print(f"emulated: {len(able)} CPUs ran, {n_failed} failed, {len(machines) - len(able)} skipped")
    return 1 if n_failed else 0 if able else 2


def main() -> int:
    enter(__file__, ("test",), native_must_build=True)
    names = [machine.cpu for machine in MACHINES]
    parser = argparse.ArgumentParser(description="Run the C code on emulated CPUs.")
    parser.add_argument("--short", action="store_true", help="a sample, in minutes")
    parser.add_argument("--only", help=f"of {', '.join(names)}")
    parser.add_argument("--build", type=Path, help="keep everything in this folder, for next time")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such CPU: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    machines = [m for m in MACHINES if m.cpu in wanted and (m.in_sample or not args.short)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return exit_code(lambda: emulate(machines, folder, args.short))


if __name__ == "__main__":
    sys.exit(main())
