"""Files that appear under their name only when they are whole, and the check that they will fit.

Owns: the temporary name, who may write under it, what reaches the disk before the rename, free
space. Must not know: what is in a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import InUse, NoSpace, NotAFile

try:
    import fcntl
except ImportError:  # Windows, where an open file can be neither renamed nor removed
    fcntl = None  # type: ignore[assignment]

# Of the folder's file system: one without locks is written to all the same.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # others may have put a link into a shared folder
_BINARY = getattr(os, "O_BINARY", 0)
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
def whole_or_nothing(path: Path, check: Callable[[Path], None] | None = None) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name at the end, or goes away on any error.

    Its bytes are on the disk before the name is: a machine that loses power keeps the old file or
    has the new one. `check` gets the whole file before it has its name, and refuses it by raising.
    A link is followed. Raises before anything is made NotAFile where `path` is a folder, a device
    or a pipe, which a rename would replace, and InUse where another process is writing it. A
    killed process leaves `.NAME.part` behind, which the next one to write NAME replaces.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise NotAFile(f"{path} is no regular file, and is left as it is; name another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(_claimed(part, path), "wb") as out:
        # While the claim is held: whoever has the next one finds this file gone or renamed.
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            if check is not None:
                check(part)
            _close_where_needed(out)
            os.replace(part, path)
        except BaseException:
            _close_where_needed(out)
            part.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _claimed(part: Path, path: Path) -> int:
    """A handle of the part file, empty, and no other process's."""
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _BINARY, 0o666)
        try:
            if fcntl is not None:
                _lock(handle, path)
            # One who had it before may have renamed or removed it between our two calls.
            if part.exists() and os.path.samestat(os.fstat(handle), part.stat()):
                os.ftruncate(handle, 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse(f"{path} is being written by another process; wait for it or end it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _close_where_needed(out: BinaryIO) -> None:
    if fcntl is None:
        out.close()


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last; not every system lets a folder be opened for that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
