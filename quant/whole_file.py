"""Files that appear under their name only when they are whole, and the check that they will fit.

Owns: the temporary name, what reaches the disk before the rename, free space. Must not know: what
is in a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import NoSpace, NotAFile

MARGIN_BYTES = 64 << 20  # what a new file leaves free on the disk


def check_space(folder: Path, need_bytes: int, what: str, advice: str) -> None:
    """Raises NoSpace; `what` needs the bytes, `advice` is what to do other than freeing some.
    The folder may be one that is still to be made."""
    there = next(f for f in (folder.resolve(), *folder.resolve().parents) if f.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < need_bytes + MARGIN_BYTES:
        raise NoSpace(
            f"{folder} has {free_bytes >> 20} MiB free, {what} needs"
            f" {(need_bytes + MARGIN_BYTES) >> 20} MiB; free some, or {advice}"
        )


@contextlib.contextmanager
def whole_or_nothing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name at the end, or goes away on any error.

    Its bytes are on the disk before the name is: a machine that loses power keeps the old file or
    has the new one. A link is followed. Raises NotAFile before anything is made where `path` is a
    folder, a device or a pipe, which a rename would replace.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise NotAFile(f"{path} is no regular file, and is left as it is; name another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    part = Path(name)
    try:
        with open(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.chmod(0o666 & ~_umask())  # mkstemp's file is for its owner alone
        os.replace(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last; not every system lets a folder be opened for that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
