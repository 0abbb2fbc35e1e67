"""One packed copy of weights in memory for all processes that hold the same tensors.

Owns: the files in shared memory, who packs, and who is the last to leave. Must not know: plans, how
weights are packed, or what reads them.

A file is there under its key only when it is whole: it is written under another name and renamed.
Each process that uses it holds a shared lock on it, which the system takes back however the process
ends; whoever then gets the exclusive lock knows that nobody uses it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from pathlib import Path

import numpy as np

from .errors import NotEnoughMemory, UnsupportedError

FOLDER = Path("/dev/shm")  # memory with names, on every Linux


class SharedWeights:
    """Room for the packed weights that `key` stands for. Use it between `open` and `close`."""

    def __init__(self, key: str, n_bytes: int, folder: Path | None = None) -> None:
        """key: a digest of everything that the packed bytes depend on; n_bytes: how many they are.
        Raises UnsupportedError where there is no such memory."""
        if not sys.platform.startswith("linux"):
            raise UnsupportedError("weights are shared between processes on Linux alone")
        self._folder = _own_folder(folder or FOLDER)
        self._path, self._n_bytes = self._folder / key, n_bytes
        self._part = self._path.with_suffix(".part")
        self._file = self._gate = -1
        self._map: mmap.mmap | None = None

    @property
    def is_there(self) -> bool:
        """Whether another process has packed them; it may be gone a moment later."""
        return self._path.exists()

    def open(self) -> tuple[np.ndarray, bool]:
        """uint8 (n_bytes,), and whether the weights are in it. If not, it is for the caller to
        write them there, then to call `publish`; all others wait.

        Raises NotEnoughMemory where they do not fit.
        """
        self._gate = _locked(self._folder / "gate", exclusive=True)
        try:
            self._sweep()
            is_packed = self._join()
            if not is_packed:
                self._begin()
            protection = mmap.PROT_READ | (0 if is_packed else mmap.PROT_WRITE)
            self._map = mmap.mmap(self._file, self._n_bytes, mmap.MAP_SHARED, protection)
        except BaseException:
            self.close()
            raise
        self._map.madvise(mmap.MADV_HUGEPAGE)  # heeded where shmem_enabled is `advise`
        if is_packed:
            self._open_gate()
        return np.frombuffer(self._map, np.uint8), is_packed

    def publish(self) -> None:
        """What `open` gave is complete: from now on others find it."""
        self._part.rename(self._path)
        _lock(self._file, exclusive=False)
        self._open_gate()

    def close(self) -> None:
        """Nothing may read the memory any more. The last one to leave removes it, and one who has
        not published."""
        if self._file >= 0:
            self._map = None  # unmapped when the last array over it has gone
            if self._gate >= 0:
                self._part.unlink(missing_ok=True)
            _remove_unused(self._path, self._file)
            _unlock(self._file)  # a map that is still there holds the file open, and so its lock
            os.close(self._file)
            self._file = -1
        self._open_gate()

    def _join(self) -> bool:
        """Takes the file of others, if there is a whole one."""
        while True:
            try:
                self._file = _locked(self._path, exclusive=False, create=False)
            except FileNotFoundError:
                return False
            status = os.fstat(self._file)
            if status.st_nlink and status.st_size == self._n_bytes:
                return True
            os.close(self._file)  # its last user has removed it while we waited
            self._file = -1

    def _begin(self) -> None:
        """A new file, with all of its memory taken: what is not there is no SIGBUS later."""
        self._part.unlink(missing_ok=True)
        self._file = _locked(self._part, exclusive=True)
        try:
            os.posix_fallocate(self._file, 0, self._n_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            found = os.statvfs(self._folder)
            free = found.f_bavail * found.f_frsize
            raise NotEnoughMemory(
                f"packed weights take {self._n_bytes} bytes of shared memory, {free} are free in "
                f"{self._folder.parent}; make it larger (in a container --shm-size), or leave "
                "--share-weights out",
                needed_bytes=self._n_bytes,
                available_bytes=free,
            ) from None

    def _sweep(self) -> None:
        """Removes what processes left that were killed, but for what can be used now."""
        for path in self._folder.iterdir():
            if path == self._path or path.name == "gate":
                continue
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                _remove_unused(path, file)
                os.close(file)

    def _open_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1


def _own_folder(parent: Path) -> Path:
    """Where nobody else may put weights."""
    if not parent.is_dir():
        raise UnsupportedError(f"there is no {parent}, in which processes could share weights")
    folder = parent / f"martlet-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_mode & 0o077:
        raise UnsupportedError(
            f"{folder} is open to others ({stat.filemode(status.st_mode)}, owner "
            f"{status.st_uid}); remove it, or leave --share-weights out"
        )
    return folder


def _locked(path: Path, *, exclusive: bool, create: bool = True) -> int:
    """An open file with a lock on it, once others let go."""
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(file, exclusive=exclusive)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int, *, exclusive: bool, wait: bool = True) -> None:
    import fcntl  # not on Windows

    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _remove_unused(path: Path, file: int) -> None:
    """The file at this path, if no one else has a lock on it."""
    with contextlib.suppress(BlockingIOError):
        _lock(file, exclusive=True, wait=False)
        if os.fstat(file).st_nlink:
            path.unlink(missing_ok=True)
