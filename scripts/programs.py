"""Other programs, as scripts that build and try the project start them: one that is not there and
one that fails end the script in a line, each with an exit code of its own.

Must not know: what is built. Only the standard library: nothing need be installed yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Missing(Exception):
    """What this machine lacks, and what brings it. Exit code 2."""


class Failed(Exception):
    """A command that failed, and what it said. Exit code 1."""


def need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise Missing(f"{program} is not installed; {package} brings it")


def find(program: str, package: str) -> str:
    """Its path; pip may have laid it beside a Python whose folder is not in PATH."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which(program) or shutil.which(program, path=beside)
    if path is None:
        raise Missing(f"{program} is not installed; {package} brings it")
    return path


def run(*command: str, environ: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What the command writes, errors included; `environ` is beside what is set anyway."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def exit_code(work: Callable[[], int]) -> int:
    """That of `work`, or of what stopped it."""
    try:
        return work()
    except Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
