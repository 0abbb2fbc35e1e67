"""Checks the project: formatting, lint, types and tests, in an environment of its own making.
`python3 scripts/test.py` runs everything; arguments go to pytest and leave the rest out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from environment import enter  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("quant", "runtime", "server", "scripts")
TYPES_FOLDER = ROOT / "build" / "types"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
C_FILES = (*(ROOT / "csrc").rglob("*.[ch]"), *(ROOT / "tests").rglob("*.c"))
C_SOURCES = sorted(str(path.relative_to(ROOT)) for path in C_FILES)
# All tests: one process per core, file by file, since a file's fixtures are models and servers.
SIDE_BY_SIDE = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile")
CHECKS = (
    ("lint", ("ruff", "check", "--quiet", ".")),
    ("format", ("ruff", "format", "--quiet", "--check", ".")),
    ("format of C", ("clang-format", "--dry-run", "--Werror", *C_SOURCES)),
    ("types", ("mypy", "-p", "martlet")),
)


def lay_out_types() -> None:
    """mypy reads folders, and in the checkout no folder is called martlet: links give it one."""
    package = TYPES_FOLDER / "martlet"
    package.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = package / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name, target_is_directory=True)


def run(*command: str) -> int:
    environ = {**os.environ, "MYPYPATH": str(TYPES_FOLDER)}
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


def program(name: str) -> str:
    """One that pip installed beside this Python; not all of them are modules as well."""
    return str(Path(sys.executable).with_name(name))


def main() -> int:
    # What drives a browser is large, and has no wheel everywhere: only where there is one.
    extras = ("browser",) if any(map(shutil.which, BROWSERS)) else ()
    enter(__file__, ("lint", "test", *extras), native_must_build=True)
    lay_out_types()
    failed = []
    for name, (tool, *arguments) in () if sys.argv[1:] else CHECKS:
        code = run(program(tool), *arguments)
        print(f"{name}: {'ok' if code == 0 else 'FAILED'}", flush=True)
        failed += [name] if code else []
    # Last, so that its summary closes the output.
    code = run(sys.executable, "-m", "pytest", *(sys.argv[1:] or SIDE_BY_SIDE))
    if failed:
        print(f"also failed, above: {', '.join(failed)}", file=sys.stderr)
    return code or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
