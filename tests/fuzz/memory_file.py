"""A file that lives in memory alone, for readers that take paths."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class MemoryFile:
    """One file whose content is replaced again and again."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("fuzz")
            self.path = Path(f"/proc/self/fd/{self._fd}")
        else:
            self._fd, name = tempfile.mkstemp()
            self.path = Path(name)

    def holding(self, data: bytes) -> Path:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        return self.path
