"""Makes the project's .venv, installs the project into it, and moves a script inside.
Knows venv, pip and where a C compiler may be; knows nothing of models or servers.
Called first by start.py and test.py on whatever Python the user has: standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

ENTERED = "martlet-entered"
OLDEST_PYTHON = (3, 10)
COMPILERS = ("cc", "gcc", "clang", "cl")
LIBRARY_SUFFIXES = {".so", ".dylib", ".dll"}
PROBE = '#include <stdio.h>\n#include <stdint.h>\nint main(void) { return puts("") < 0; }\n'


class SetupError(Exception):
    """One line: what went wrong and what to do next."""


@dataclass(frozen=True)
class Stamp:
    """What was installed, as written into .venv when an installation succeeded."""

    root: str
    fingerprint: str
    extras: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(fields["root"], fields["fingerprint"], tuple(fields["extras"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)

    def covers(self, wanted: Stamp) -> bool:
        same = (self.root, self.fingerprint) == (wanted.root, wanted.fingerprint)
        return same and set(wanted.extras) <= set(self.extras)


def fingerprint(root: Path, compiler: str | None) -> str:
    """Changes whenever an installation would come out differently: the project's metadata,
    any file under csrc/ (by content, so that a checkout's new times do not count), the compiler."""
    digest = hashlib.sha256(f"{compiler}\n".encode())
    for path in [root / "pyproject.toml", *sorted((root / "csrc").rglob("*"))]:
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """The C compiler CMake would take, if it can build a small program; CC wins, as in CMake."""
    named = shlex.split(environ.get("CC", ""))[:1]
    for name in named or COMPILERS:
        path = shutil.which(name, path=environ.get("PATH", os.defpath))
        if path and compiles(path, environ):
            return path
    return None


def compiles(compiler: str, environ: Mapping[str, str]) -> bool:
    """False for a compiler that cannot find its own headers or linker: CMake would stop later
    with pages of output."""
    if Path(compiler).stem.lower() == "cl":
        return True  # takes other options, and comes with its headers
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE)
        command = [compiler, str(source), "-o", str(Path(folder, "probe"))]
        try:
            done = subprocess.run(command, env=dict(environ), capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def venv_python(venv: Path) -> Path:
    return venv / "Scripts/python.exe" if os.name == "nt" else venv / "bin/python"


def has_library(venv: Path) -> bool:
    found = venv.glob("**/site-packages/martlet/runtime/executors/*martlet*")
    return any(path.suffix in LIBRARY_SUFFIXES for path in found)


def make_venv(venv: Path, *, fresh: bool) -> None:
    if venv_python(venv).exists() and not fresh:
        return
    say(f"making {venv} (Python {sys.version.split()[0]})")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
        raise SetupError(
            f"{sys.executable} could not make {venv}: {output.splitlines()[-1]}; on Debian and"
            " Ubuntu `apt install python3-venv` brings what is missing"
        )


def install(venv: Path, root: Path, extras: Sequence[str], *, native: bool) -> None:
    """pip install --editable, its whole output in a log and its steps on one line."""
    python = str(venv_python(venv))
    target = f"{root}[{','.join(extras)}]" if extras else str(root)
    environ = dict(os.environ)
    if not native:
        environ["SKBUILD_WHEEL_CMAKE"] = "false"  # scikit-build-core: leave the C part out
    if "lint" in extras:
        environ["SKBUILD_CMAKE_DEFINE"] = "MARTLET_WERROR=ON"  # no warning passes the tests
    log_path = venv / "install.log"
    command = [python, "-m", "pip", "install", "--verbose", "--progress-bar", "off"]
    with open(log_path, "w", encoding="utf-8") as log:
        code = run_logged([*command, "--editable", target], environ, log)
    if code:
        raise SetupError(f"pip failed: {last_error(log_path)}; the whole log is {log_path}")


def run_logged(command: Sequence[str], environ: Mapping[str, str], log: IO[str]) -> int:
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stdout is not None
        with steps_line() as show:
            for line in child.stdout:
                log.write(line)
                show(pip_step(line))
    return child.returncode


PIP_STEPS = {
    "Collecting": "looking for",
    "Downloading": "downloading",
    "Building": "building",
    "***": "building",
    "Installing": "installing",
}
NINJA_STEP = re.compile(r"\[\d+/\d+\]")


def pip_step(line: str) -> str | None:
    """`Collecting numpy>=1.26` -> `looking for numpy>=1.26`; None for lines without news."""
    words = line.split()
    if words and NINJA_STEP.fullmatch(words[0]):
        return f"compiling C {words[0]}"
    if len(words) < 2 or words[0] not in PIP_STEPS:
        return None
    return f"{PIP_STEPS[words[0]]} {' '.join(words[1:4])}"


def last_error(log_path: Path) -> str:
    lines = deque(log_path.read_text(encoding="utf-8").splitlines(), maxlen=400)
    errors = [line.strip() for line in lines if "error:" in line.lower()]
    return (errors or [line.strip() for line in lines if line.strip()] or ["no output"])[-1]


def show_errors(log_path: Path, n_lines: int = 25) -> None:
    """From the first error on, for whoever sees the output but not the machine, as in CI."""
    lines = log_path.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line.lower()), len(lines))
    for line in lines[first : first + n_lines]:
        say(line)


class StepsLine:
    """On a terminal one line that is rewritten; elsewhere a line every ten seconds."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty()
        self.start = time.monotonic()
        self.next_line_s = 0.0

    def __call__(self, step: str | None) -> None:
        elapsed_s = time.monotonic() - self.start
        if step is None or (not self.is_terminal and elapsed_s < self.next_line_s):
            return
        self.next_line_s = elapsed_s + 10
        text = f"[{elapsed_s:4.0f} s] {step}"
        width = shutil.get_terminal_size().columns - 1
        shown = f"\r\x1b[K{text[:width]}" if self.is_terminal else f"{text}\n"
        self.stream.write(shown)
        self.stream.flush()


@contextlib.contextmanager
def steps_line() -> Iterator[StepsLine]:
    show = StepsLine(sys.stderr)
    yield show
    if show.is_terminal:
        sys.stderr.write("\r\x1b[K")


def prepare(root: Path, extras: Sequence[str], *, native_must_build: bool = False) -> Path:
    """The .venv's python, installing only what the stamp does not already vouch for."""
    venv = root / ".venv"
    stamp_path = venv / "martlet-stamp.json"
    compiler = find_compiler(os.environ)
    before = Stamp.read(stamp_path)
    wanted = Stamp(str(root), fingerprint(root, compiler), tuple(sorted(extras)))
    if compiler is None:
        names = os.environ.get("CC") or ", ".join(COMPILERS)
        say(f"no working C compiler ({names}): native library left out, the Numba executor serves")
    missing = native_must_build and compiler is not None and not has_library(venv)
    if before and before.covers(wanted) and venv_python(venv).exists() and not missing:
        return venv_python(venv)
    kept = before.extras if before and before.root == wanted.root else ()
    wanted = Stamp(wanted.root, wanted.fingerprint, tuple(sorted({*kept, *extras})))
    make_venv(venv, fresh=before is not None and before.root != wanted.root)
    start = time.monotonic()
    say("installing martlet and what it needs (first time: one to three minutes, more if busy)")
    stamp_path.unlink(missing_ok=True)
    # On Windows CMake also finds a Visual Studio that is not on the PATH.
    install(venv, root, wanted.extras, native=compiler is not None or os.name == "nt")
    if compiler is not None and not has_library(venv):
        line = f"the C code did not build with {compiler} (see {venv / 'install.log'})"
        if native_must_build:
            show_errors(venv / "install.log")
            raise SetupError(f"{line}; mend it, or hide the compiler with CC=/nonexistent")
        say(f"{line}: native library left out, the Numba executor serves")
    wanted.write(stamp_path)
    say(f"installed in {time.monotonic() - start:.0f} s")
    return venv_python(venv)


def enter(script: str, extras: Sequence[str], *, native_must_build: bool = False) -> None:
    """Prepares .venv and runs `script` again in there, where this returns at once."""
    if ENTERED in sys._xoptions:  # unlike a variable, this is not inherited by our children
        return
    root = Path(script).resolve().parents[1]
    try:
        if sys.version_info < OLDEST_PYTHON:
            found = sys.version.split()[0]
            raise SetupError(f"martlet needs Python 3.10 or newer, this is {found}")
        python = prepare(root, extras, native_must_build=native_must_build)
    except SetupError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error}; is there space, and may this user write to {root}?")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run the same command again to go on")
    command = [str(python), "-X", ENTERED, str(Path(script).resolve()), *sys.argv[1:]]
    if os.name == "nt":  # exec on Windows returns to the shell before the child is done
        sys.exit(subprocess.run(command).returncode)
    os.execv(command[0], command)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
