"""A whole file mapped into memory to be read, and whether it still is the file that was opened.

Owns: the map and the mark of change. Must not know: what is in the file, who reads it.

A file that gets another under its name stays as it was for those who have it mapped. One that is
written to or cut short does not: its bytes are others from then on, or none, and reading those ends
a process by SIGBUS (csrc/faults.c).
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from .errors import FileChanged, FileFormatError


class FileMap(mmap.mmap):
    path: Path
    _opened: os.stat_result

    @classmethod
    def open(cls, path: Path) -> FileMap:
        """Raises FileFormatError for what has no bytes to map, OSError."""
        # A pipe or device has no size to check against, and opening one may block.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileFormatError("is not a regular file")
        with open(path, "rb") as file:
            opened = os.fstat(file.fileno())
            if opened.st_size == 0:  # mmap refuses this with a ValueError
                raise FileFormatError("is empty; a GGUF header has 24 bytes")
            mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.path, mapped._opened = path, opened
        return mapped

    def check(self) -> None:
        """Raises FileChanged once the file has been written to, as far as its times tell."""
        try:
            now = os.stat(self.path)
        except OSError:  # the name is gone, and the file stays for as long as it is mapped
            return
        if os.path.samestat(now, self._opened) and _mark(now) != _mark(self._opened):
            raise changed(self.path)


def changed(path: Path) -> FileChanged:
    return FileChanged(
        f"{path.name} was changed or cut short while it was in use; start again with a whole file, "
        "and replace one that is in use by renaming another over it"
    )


def map_under(values: np.ndarray) -> FileMap | None:
    """The mapped file that the array is a read-only view of."""
    base: object = values
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return None
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, FileMap) else None


def _mark(of: os.stat_result) -> tuple[int, int]:
    return of.st_size, of.st_mtime_ns
