"""Installs wheels where no compiler is and lets a model answer:

    python scripts/try_wheel.py --model MODEL.gguf WHEEL...
        [--cpu cortex-a53,cortex-a72,max] [--musl-root FOLDER] [--build FOLDER]

A wheel of this machine goes into a fresh environment. For 64-bit ARM, Python is unpacked from
Debian's packages (apt-get, dpkg) into the folder, with what the wheel requires beside it, and runs
on emulated CPUs (qemu-user-static); nothing is installed on this machine. A wheel for musl needs a
root with a Python for musl (docs/platforms.md), since nobody has packages of one. `martlet doctor`
must find native kernels, and every answer must be the same text. Must not know: what is in a wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from programs import Failed, Missing, exit_code, need, run  # type: ignore[import-not-found]

EMULATOR = "qemu-aarch64-static"
CPUS = ("cortex-a53", "cortex-a72", "max")
# What wheels may want: the glibc of Debian 12, 2.36, and musl 1.2.
GLIBC = ("manylinux2014", *(f"manylinux_2_{i}" for i in range(17, 37)))
MUSL = tuple(f"musllinux_1_{i}" for i in range(3))
PROMPT, N_TOKENS = "The capital of France is", 8


@dataclass(frozen=True)
class Place:
    """A Python into which a wheel is installed, and what a line about it begins with."""

    name: str
    python: Sequence[str]
    environ: Mapping[str, str]

    def martlet(self, *arguments: str) -> str:
        environ = {"PYTHONNOUSERSITE": "1", **self.environ}
        command = [*self.python, "-m", "martlet.scripts.cli", *arguments]
        said: str = run(*command, environ=environ, cwd=Path("/"))
        return said


def machine_of(wheel: Path) -> str:
    names = r"((?:many|musl)linux_\d+_\d+|macosx_\d+_\d+|win)_([a-z0-9_]+)\.whl$"
    found = re.search(names, wheel.name)
    if found is None:
        raise Missing(f"{wheel.name}: how to try a wheel of this name is not known")
    return found[2]


def places(
    wheel: Path, folder: Path, cpus: Sequence[str], musl_root: Path | None
) -> Iterator[Place]:
    machine, is_musl = machine_of(wheel), "musllinux" in wheel.name
    is_native = machine == platform.machine().lower()
    if is_native and not is_musl:
        yield fresh_environment(wheel, folder / "venv")
    elif is_musl or machine == "aarch64":
        root = musl_root if is_musl else unpack_python(folder)
        if root is None:
            raise Missing(f"{wheel.name} needs --musl-root, see docs/platforms.md")
        python, site = python_of(root), folder / "site"
        install_beside(
            wheel, site, python, [f"{name}_{machine}" for name in (MUSL if is_musl else GLIBC)]
        )
        environ = {"PYTHONPATH": str(site)}
        if is_native:
            yield Place(f"{machine} with musl", (str(python),), environ)
            return
        for cpu in cpus:
            emulated = {**environ, "QEMU_CPU": cpu, "OPENBLAS_NUM_THREADS": "1"}
            yield Place(cpu, (EMULATOR, "-L", str(root), str(python)), emulated)
    else:
        raise Missing(f"{wheel.name} is for {machine}, this machine is {platform.machine()}")


def python_of(root: Path) -> Path:
    found = [path for path in (root / "usr/bin").glob("python3.[0-9]*") if "-" not in path.name]
    if not found:
        raise Missing(f"{root} has no usr/bin/python3.*")
    return found[0]


def fresh_environment(wheel: Path, venv: Path) -> Place:
    """With no program on the path but its own: whatever wants a compiler fails."""
    run(sys.executable, "-m", "venv", "--clear", str(venv))
    binaries = venv / ("Scripts" if os.name == "nt" else "bin")
    environ = {"PATH": str(binaries), "PYTHONPATH": "", "CC": ""}
    python = (str(binaries / "python"),)
    run(*python, "-m", "pip", "install", "--quiet", str(wheel), environ=environ)
    return Place(platform.machine(), python, environ)


def unpack_python(folder: Path) -> Path:
    """A root with Debian's Python for ARM and all it needs."""
    need(EMULATOR, "qemu-user-static")
    need("apt-get", "apt-get, which is Debian's,")
    root = folder / "root"
    if not root.is_dir():
        apt, parts = folder / "apt", folder / "root.part"
        for name in ("lists/partial", "archives/partial"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        options = (
            "APT::Architecture=arm64",
            "APT::Architectures=arm64",
            "APT::Sandbox::User=root",
            "Dir::State::status=/dev/null",  # nothing is there yet: all that it needs comes along
            f"Dir::State::lists={apt / 'lists'}",
            f"Dir::Cache::archives={apt / 'archives'}",
            "Debug::NoLocking=1",
        )
        get = ("apt-get", "-q", "-y", *(f"-o{option}" for option in options))
        run(*get, "update")
        run(*get, "install", "--download-only", "--no-install-recommends", "python3", "libstdc++6")
        for package in (apt / "archives").glob("*.deb"):
            run("dpkg", "-x", str(package), str(parts))
        parts.rename(root)
    return root


def install_beside(wheel: Path, site: Path, python: Path, platforms: Sequence[str]) -> None:
    """The wheel and what it requires, of wheels alone, for a Python that is not run for it."""
    version = python.name.removeprefix("python")
    abis = (f"cp{version.replace('.', '')}", "abi3", "none")
    options = ("--implementation=cp", f"--python-version={version}", "--only-binary=:all:")
    accepted = [f"--abi={abi}" for abi in abis] + [f"--platform={name}" for name in platforms]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--upgrade")
    run(*pip, f"--target={site}", *options, *accepted, str(wheel))


def answer(place: Place, model: Path) -> str:
    """What it says of the machine, shown, and its answer to the prompt."""
    said = place.martlet("doctor")
    for line in said.splitlines():
        if line.startswith(("isa", "executor")):
            print(f"{place.name}: {line}", flush=True)
    options = ("--prompt", PROMPT, "--max-tokens", str(N_TOKENS), "--raw", "--executor", "native")
    said = place.martlet("run", str(model), *options)
    print(f"{place.name}: {said.strip()}", flush=True)
    return said.rpartition("\nttft ")[0]


def try_wheels(
    wheels: Sequence[Path], model: Path, folder: Path, cpus: Sequence[str], musl_root: Path | None
) -> int:
    answers: dict[str, str] = {}
    for wheel in wheels:
        print(wheel.name, flush=True)
        for place in places(wheel, folder / wheel.stem, cpus, musl_root):
            answers[f"{wheel.stem} on {place.name}"] = answer(place, model)
    if len(set(answers.values())) != 1:
        raise Failed("\n".join(["answers differ:", *map(": ".join, answers.items())]))
    print(f"{len(answers)} answers, all the same")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Install wheels and let a model answer.")
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, small if emulated")
    parser.add_argument("--cpu", default=",".join(CPUS), help="of ARM, as qemu names them")
    parser.add_argument("--musl-root", type=Path, help="has usr/bin/python3.* for musl")
    parser.add_argument("--build", type=Path, help="keep everything in this folder, for next time")
    args = parser.parse_args()
    wheels, model = [path.resolve() for path in args.wheels], args.model.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        cpus, musl_root = args.cpu.split(","), args.musl_root and args.musl_root.resolve()
        return exit_code(lambda: try_wheels(wheels, model, folder, cpus, musl_root))


if __name__ == "__main__":
    sys.exit(main())
