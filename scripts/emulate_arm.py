"""Builds the C code for 64-bit ARM and runs its tests on emulated cores, on Debian and its kin.

    python scripts/emulate_arm.py [--cpu cortex-a53,cortex-a72,cortex-a76,max] [--build FOLDER]
                                  [pytest arguments]

Wants gcc-aarch64-linux-gnu, qemu-user-static, cmake and apt-get. An ARM Python is unpacked from
Debian's packages into the folder, its own packages beside it; nothing is installed on this machine.
cortex-a53 and a72 have no dot product, a76 has one, max has everything. Emulation takes some thirty
times as long as the machine itself. Must not know: what the tests test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPUS = ("cortex-a53", "cortex-a72", "cortex-a76", "max")
SAMPLE = ("test_native_columns.py", "test_native_attention.py", "test_native_rows.py")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
PACKAGES = ("cffi", "gguf", "hypothesis", "jinja2", "numpy", "pytest", "pytest-timeout")
MORE_PACKAGES = ("numba", "prometheus-client", "safetensors", "sentencepiece", "threadpoolctl")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")


class Missing(Exception):
    """One line: what this machine lacks. Exit code 2."""


class Failed(Exception):
    """What a command said that failed. Exit code 1."""


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def check_programs() -> None:
    packages = {
        COMPILER: "gcc-aarch64-linux-gnu",
        EMULATOR: "qemu-user-static",
        "cmake": "cmake",
        "apt-get": "apt-get, which is Debian's,",
    }
    for program, package in packages.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is not installed; {package} brings it")


def build(folder: Path) -> Path:
    """The library; martlet.h is laid beside it, where the executor looks for it."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    options = [*target, f"-DCMAKE_C_COMPILER={COMPILER}", "-DMARTLET_WERROR=ON", *generator]
    made = str(folder / "build")
    run("cmake", "-S", str(ROOT / "csrc"), "-B", made, *options)
    run("cmake", "--build", made, "--parallel", str(os.cpu_count() or 1))
    run("cmake", "--install", made, "--prefix", str(folder / "library"))
    return next((folder / "library").glob("martlet/**/libmartlet.so"))


def unpack_python(folder: Path) -> Path:
    """A root with Debian's Python for ARM and all it needs; returns its program."""
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
        shutil.rmtree(apt)
    return next((root / "usr/bin").glob("python3.[0-9]*"))


def install_packages(folder: Path, python: Path) -> Path:
    site = folder / "site"
    if not site.is_dir():
        version = python.name.removeprefix("python")
        abi = f"cp{version.replace('.', '')}"
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        abis = [f"--abi={abi}", "--abi=abi3", "--abi=none", "--implementation=cp"]
        target = [f"--target={folder / 'site.part'}", f"--python-version={version}"]
        only = ["--only-binary=:all:", "--quiet", "--no-input"]
        packages = [*PACKAGES, *MORE_PACKAGES]
        pip = [sys.executable, "-m", "pip", "install"]
        run(*pip, *only, *target, *platforms, *abis, *packages)
        (folder / "site.part").rename(site)
    return site


def lay_out_package(folder: Path) -> Path:
    """In the checkout no folder is called martlet: links give it one."""
    package = folder / "package" / "martlet"
    package.mkdir(parents=True, exist_ok=True)
    for name in ("quant", "runtime", "server", "scripts"):
        if not (package / name).is_symlink():
            (package / name).symlink_to(ROOT / name, target_is_directory=True)
    return package.parent


def run_tests(
    cpu: str, python: Path, library: Path, paths: Sequence[Path], arguments: Sequence[str]
) -> int:
    environ = {
        **os.environ,
        "MARTLET_LIBRARY": str(library),
        "MARTLET_SANITIZED": "1",  # as slow as that: tests make fewer examples
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "QEMU_CPU": cpu,
    }
    root = python.parents[2]
    command = [EMULATOR, "-L", str(root), str(python), "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the native tests on emulated ARM cores.")
    parser.add_argument("--cpu", default=",".join(CPUS), help="comma-separated, as qemu names them")
    parser.add_argument("--build", type=Path, help="keep everything in this folder, for next time")
    args, pytest_arguments = parser.parse_known_args()
    tests = [str(ROOT / "tests" / "runtime" / name) for name in SAMPLE]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        try:
            check_programs()
            library, python = build(folder), unpack_python(folder)
            paths = [lay_out_package(folder), install_packages(folder, python)]
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        failed = []
        for cpu in args.cpu.split(","):
            print(f"== {cpu}", flush=True)
            if run_tests(
                cpu, python, library, paths, pytest_arguments or [*tests, "-q", "-x", "--timeout=0"]
            ):
                failed.append(cpu)
    if failed:
        print(f"error: failed on {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
