"""Blocks of known prefixes on disk, so that they outlive the pool and the process.

Owns: the files, their format, their bound in bytes, the thread that writes them. Must not know:
references, requests, what is in a block.

A file holds one block: a header, all tokens from position 0 to the block's end, its keys and
values, a checksum. It is found by the digest of its chain, and taken only if fingerprint, tokens
and checksum agree; anything else is a miss and the file is removed. Files are written beside their
place and moved there, so a crash leaves no half file under a known name. The files kept longest ago
go first; a prefix is kept from its end to its start, so its start lives longest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from .errors import MartletError, ModelError, UnsupportedError
from .prefix_index import Key, Prefix
from .window_parts import NONE

log = logging.getLogger(__name__)

MAGIC = b"MTKV0001"
HEADER = struct.Struct("<8s32sIQ")  # magic, fingerprint, bytes of tokens, bytes of the block
CHECKSUM_BYTES = 16
SUFFIX, PARTIAL_SUFFIX = ".kv", ".partial"
QUEUE_BYTES = 64 << 20  # read from the pool and not written yet; beyond it evicted blocks are lost
MOST_FIRST_BYTES = 1 << 16  # of a first block's tokens and salt: longer ones are not looked at
DEFAULT_MAX_BYTES = 1 << 30


class SavingExecutor(Protocol):
    """An executor whose blocks can be taken out and put back."""

    name: str

    def read_block(self, block: int, window_block: int | None = None) -> bytes: ...

    def write_block(self, block: int, data: bytes, window_block: int | None = None) -> None: ...


class PrefixStore:
    """The files of one folder. One engine writes it; others may share it."""

    def __init__(self, folder: Path, fingerprint: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES):
        """fingerprint: of all that shapes a block's bytes; files of others are counted and aged,
        never read."""
        self.folder, self.max_bytes = folder, max_bytes
        self.fingerprint = hashlib.blake2b(fingerprint, digest_size=32).digest()
        self.n_lost = 0
        """Blocks that were evicted while too many waited to be written, or could not be."""
        self._lock = threading.Lock()  # guards all below, and n_lost
        self._sizes: OrderedDict[str, int] = OrderedDict()  # kept longest ago first
        self._verified: set[str] = set()  # read or written in this life
        self._of_others: set[bytes] = set()  # of the tokens in files of another fingerprint
        self._pending: dict[str, bytes] = {}
        self._pending_bytes = 0
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise ModelError(
                f"prefix cache {folder}: {error.strerror}; choose another folder"
            ) from error
        self._writer = threading.Thread(target=self._write_all, name="martlet-kv", daemon=True)
        self._writer.start()

    @property
    def n_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def has(self, digest: bytes) -> bool:
        name = digest.hex()
        with self._lock:
            return name in self._pending or name in self._sizes

    def has_of_others(self, tokens: bytes) -> bool:
        """Whether files of another fingerprint were there at the start, one with these tokens."""
        return _checksum(tokens) in self._of_others

    def load(self, digest: bytes, tokens: bytes) -> bytes | None:
        """The block, or None if there is none with these tokens."""
        name = digest.hex()
        with self._lock:
            data = self._pending.get(name)
        if data is None:
            with contextlib.suppress(OSError):
                data = self._path(name).read_bytes()
        block = None if data is None else self._opened(data, tokens)
        if block is None:
            self.forget(digest)
            return None
        with self._lock:
            self._verified.add(name)
        return block

    def save(self, digest: bytes, tokens: Callable[[], bytes], read: Callable[[], bytes]) -> None:
        """Keeps a block, or notes that it was wanted again. The arguments are called if needed."""
        name = digest.hex()
        with self._lock:
            if name in self._pending:
                return
            # A file found at the start and never read may be damaged: it is written again.
            if name in self._sizes and name in self._verified:
                self._sizes.move_to_end(name)
                self._work.put(name)
                return
            if self._pending_bytes > QUEUE_BYTES:
                self.n_lost += 1
                return
        data = self._sealed(tokens(), read())
        if len(data) > self.max_bytes:
            return
        with self._lock:
            self._pending[name] = data
            self._pending_bytes += len(data)
        self._work.put(name)

    def touch(self, digest: bytes) -> None:
        """Notes that a block was wanted again, if it is on disk."""
        name = digest.hex()
        with self._lock:
            if name in self._sizes and name not in self._pending:
                self._sizes.move_to_end(name)
                self._work.put(name)

    def wait(self) -> None:
        """Until what was saved before is written, or half of it: room for more."""
        while True:
            with self._lock:
                if self._pending_bytes <= QUEUE_BYTES // 2 or not self._writer.is_alive():
                    return
            time.sleep(0.005)

    def forget(self, digest: bytes) -> None:
        name = digest.hex()
        with self._lock:
            self._sizes.pop(name, None)
            self._verified.discard(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def close(self) -> None:
        """Writes what is left."""
        self._work.put(None)
        self._writer.join()

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)

    def _sealed(self, tokens: bytes, block: bytes) -> bytes:
        body = HEADER.pack(MAGIC, self.fingerprint, len(tokens), len(block)) + tokens + block
        return body + _checksum(body)

    def _opened(self, data: bytes, tokens: bytes) -> bytes | None:
        start = HEADER.size + len(tokens)
        if len(data) < start + CHECKSUM_BYTES:
            return None
        n_block = len(data) - start - CHECKSUM_BYTES
        head = HEADER.pack(MAGIC, self.fingerprint, len(tokens), n_block) + tokens
        body = memoryview(data)[:-CHECKSUM_BYTES]
        if data[:start] != head or data[-CHECKSUM_BYTES:] != _checksum(body):
            return None
        return bytes(body[start:])

    def _scan(self) -> None:
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another engine may have removed it just now
                stat = path.stat()
                if path.suffix == SUFFIX:
                    found.append((stat.st_mtime_ns, path.stem, stat.st_size))
                    self._note_if_of_others(path)
                elif path.suffix == PARTIAL_SUFFIX and _is_abandoned(path):
                    path.unlink()
        self._sizes.update((name, size) for _, name, size in sorted(found))

    def _note_if_of_others(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size or not head.startswith(MAGIC):
                return
            _, fingerprint, n_tokens, _ = HEADER.unpack(head)
            if fingerprint != self.fingerprint:
                self._of_others.add(_checksum(file.read(min(n_tokens, MOST_FIRST_BYTES))))

    # ---- the writing thread ----------------------------------------------------------------------

    def _write_all(self) -> None:
        was_kept = True
        while (name := self._work.get()) is not None:
            with self._lock:
                data = self._pending.get(name)
            try:
                if data is None:
                    os.utime(self._path(name))
                else:
                    self._write(name, data)
                was_kept = True
            except Exception as error:  # a full disk, no memory: a block less, and nothing else
                # Once for as long as it lasts: there may be thousands.
                log.log(
                    logging.DEBUG if not was_kept else logging.WARNING,
                    "prefix cache: %s is not kept: %s",
                    self._path(name),
                    error,
                )
                was_kept = False
                with self._lock:
                    self.n_lost += data is not None
            with self._lock:
                self._pending.pop(name, None)
                self._pending_bytes -= len(data or b"")

    def _write(self, name: str, data: bytes) -> None:
        self._make_room(len(data))
        partial = self.folder / f"{name}.{os.getpid()}{PARTIAL_SUFFIX}"
        try:
            with partial.open("wb") as file:
                if fcntl is not None:
                    with contextlib.suppress(OSError):  # of a file system without locks
                        fcntl.flock(file, fcntl.LOCK_EX)
                file.write(data)
            os.replace(partial, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        with self._lock:
            self._sizes[name] = len(data)
            self._sizes.move_to_end(name)
            self._verified.add(name)

    def _make_room(self, n_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or sum(self._sizes.values()) + n_bytes <= self.max_bytes:
                    return
                name, _ = self._sizes.popitem(last=False)
                self._verified.discard(name)
            self._path(name).unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    """Whether nobody is writing the file. Windows removes none that is open."""
    if fcntl is None:
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody has it, or nobody can tell
            return False
    return True


def check_saves(executor: object, name: str, reason: str = "") -> None:
    """executor: or its class. reason: why it was taken. Raises UnsupportedError."""
    if not all(hasattr(executor, method) for method in ("read_block", "write_block")):
        why = f" ({reason})" if reason else ""
        raise UnsupportedError(
            f"executor {name} cannot save blocks{why}: leave the prefix cache folder "
            "out, or get the native executor (`martlet doctor` says what it lacks)"
        )


class DiskTier:
    """What the pool asks of a second tier, over a store and the executor that holds the blocks."""

    def __init__(self, store: PrefixStore, executor: SavingExecutor) -> None:
        check_saves(executor, executor.name)
        self.store, self._executor = store, executor

    def has(self, digest: bytes) -> bool:
        return self.store.has(digest)

    def has_of_others(self, content: bytes) -> bool:
        return self.store.has_of_others(content)

    def restore(self, keys: list[Key], block: int, part: int) -> bool:
        """Fills a free block with the one that ends this chain; False if it is not to be had."""
        digest = keys[-1].digest
        data = self.store.load(digest, b"".join(key.content for key in keys))
        if data is None:
            return False
        try:
            self._executor.write_block(block, data, part)
        except MartletError as error:
            log.warning("prefix cache: %s", error)
            self.store.forget(digest)
            return False
        return True

    def keep(self, prefix: Prefix, part: int) -> None:
        if part == NONE:
            self.store.touch(prefix.digest)
            return
        self.store.save(
            prefix.digest,
            lambda: _all_tokens(prefix),
            lambda: self._executor.read_block(prefix.block, part),
        )

    def keep_all(self, prefixes: list[tuple[Prefix, int]]) -> None:
        for prefix, part in prefixes:
            self.store.wait()
            self.keep(prefix, part)


def _all_tokens(prefix: Prefix) -> bytes:
    parts = []
    at: Prefix | None = prefix
    while at is not None:
        parts.append(at.content)
        at = at.parent
    return b"".join(reversed(parts))


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()
