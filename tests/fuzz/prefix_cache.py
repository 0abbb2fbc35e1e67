"""The folder of the prefix cache, whose files others may spoil: a block comes out only where
fingerprint, tokens and checksum agree, and the folder stays within its bound.

An input is a row of calls of the store and of changes behind its back, CALL_BYTES each; the writer
of a file takes its SPOIL_BYTES too. Checksums are made right again where an input asks for it, as
nothing changed at random would get past them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from martlet.runtime.prefix_store import HEADER, MAGIC, SUFFIX, PrefixStore

MOST_BYTES = 160
MOST_CALLS, MOST_OPENED = 24, 4
CALL_BYTES, SPOIL_BYTES = 4, 8
DIGESTS = [bytes([n]) * 16 for n in range(3)]
TOKENS = [bytes(range(64)), bytes(64), bytes(range(32)), b""]
BLOCKS = [b"keys and values " * 4, b"\0" * 64, b""]
FINGERPRINTS = [b"model", b"another"]
MOST_KEPT = [1 << 20, 500, 200, 64]
NAMES = [
    *(digest.hex() + SUFFIX for digest in DIGESTS),
    "00.1.partial",
    "no name" + SUFFIX,
    SUFFIX,
    "other.txt",
]


def _folder() -> Path:
    memory = Path("/dev/shm")
    kept = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    return Path(kept)


FOLDER = _folder()


def checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def sealed(fingerprint: bytes, tokens: bytes, block: bytes) -> bytes:
    """A file as it should be, by the description in prefix_store.py."""
    digest = hashlib.blake2b(fingerprint, digest_size=32).digest()
    body = struct.pack("<8s32sIQ", MAGIC, digest, len(tokens), len(block)) + tokens + block
    return body + checksum(body)


def spoiled(raw: bytes, spoil: bytes) -> bytes:
    """spoil: what to do (1: the checksum is right in the end, 2: bytes are missing, 4: there are
    more), how many bytes, and three places with what they are changed by."""
    how, n, *edits = spoil.ljust(SPOIL_BYTES, b"\0")
    body = bytearray(raw[:-16])
    for at, change in zip(edits[::2], edits[1::2], strict=True):
        body[at % len(body)] ^= change
    if how & 2:
        del body[max(len(body) - n, 0) :]
    if how & 4:
        body += bytes(n)
    return bytes(body) + (checksum(bytes(body)) if how & 1 else raw[-16:])


class Trial:
    """A store, and what may come out of it: all that was ever under a name."""

    def __init__(self) -> None:
        self.held: defaultdict[int, list[bytes]] = defaultdict(list)
        self.n_opened = 0
        self.open(0, 0)

    def open(self, which: int, bound: int) -> None:
        self.fingerprint = FINGERPRINTS[which % 2]
        most = MOST_KEPT[bound % 4]
        self.store = PrefixStore(FOLDER, self.fingerprint, max_bytes=most)
        self.most_bytes = max(most, self.store.n_bytes)
        self.n_opened += 1
        self.has_saved = False

    def close(self) -> None:
        self.store.close()
        assert self.store.n_bytes <= self.most_bytes

    def reopen(self, a: int, b: int, _: int) -> None:
        if self.n_opened < MOST_OPENED:
            self.close()
            self.open(a, b)

    def save(self, a: int, b: int, c: int) -> None:
        which, tokens, block = a % len(DIGESTS), TOKENS[b % 4], BLOCKS[c % 3]
        self.held[which].append(sealed(self.fingerprint, tokens, block))
        self.has_saved = True
        self.store.save(DIGESTS[which], lambda: tokens, lambda: block)
        while not c & 64 and self.store._pending:  # else the next call may come before it is kept
            time.sleep(0)

    def load(self, a: int, b: int, _: int) -> None:
        which, tokens = a % len(DIGESTS), TOKENS[b % 4]
        block = self.store.load(DIGESTS[which], tokens)
        path = FOLDER / NAMES[which]
        if block is None:
            assert self.has_saved or not path.is_file()
        else:
            assert sealed(self.fingerprint, tokens, block) in self.held[which]

    def touch(self, a: int, b: int, _: int) -> None:
        (self.store.forget if b % 2 else self.store.touch)(DIGESTS[a % len(DIGESTS)])

    def ask(self, a: int, b: int, _: int) -> None:
        self.store.has(DIGESTS[a % len(DIGESTS)])
        self.store.has_of_others(TOKENS[b % 4])
        assert self.store.n_bytes >= 0

    def write(self, a: int, b: int, c: int, spoil: bytes) -> None:
        """A file behind the store's back, or (c) no file or a folder of that name."""
        path = FOLDER / NAMES[a % len(NAMES)]
        remove(path)
        if c % 16 == 15:
            path.mkdir()
        elif c % 16 != 14:
            raw = sealed(FINGERPRINTS[c // 16 % 2], TOKENS[b % 4], BLOCKS[c % 3])
            raw = spoiled(raw, spoil)
            self.held[a % len(NAMES)].append(raw)
            path.write_bytes(raw)


CALLS = (Trial.load, Trial.save, Trial.reopen, Trial.touch, Trial.ask)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() else path.unlink()


def run(data: bytes) -> None:
    for path in FOLDER.iterdir():
        remove(path)
    trial = Trial()
    try:
        at = 0
        for _ in range(MOST_CALLS):
            if at + CALL_BYTES > len(data):
                break
            call, a, b, c = data[at : at + CALL_BYTES]
            at += CALL_BYTES
            if call % 6 == len(CALLS):
                trial.write(a, b, c, data[at : at + SPOIL_BYTES])
                at += SPOIL_BYTES
            else:
                CALLS[call % 6](trial, a, b, c)
    finally:
        trial.close()


def seeds() -> Iterator[bytes]:
    load, save, reopen, touch, ask, write = (lambda *args, n=n: bytes([n, *args]) for n in range(6))
    sound, resealed = bytes(SPOIL_BYTES), bytes([1, 0, HEADER.size, 1, 0, 0, 0, 0])
    yield save(0, 0, 0) + load(0, 0, 0) + reopen(0, 0, 0) + load(0, 0, 0) + load(0, 1, 0)
    yield write(0, 0, 0) + sound + reopen(0, 0, 0) + ask(0, 0, 0) + load(0, 0, 0)
    yield write(0, 0, 0) + resealed + reopen(0, 0, 0) + load(0, 0, 0) + touch(0, 1, 0)
    in_block = bytes([0, 0, HEADER.size + len(TOKENS[0]), 1, 0, 0, 0, 0])
    yield write(0, 0, 0) + in_block + reopen(0, 0, 0) + load(0, 0, 0) + ask(0, 0, 0)
    yield save(0, 0, 0) + save(1, 1, 1) + save(2, 2, 2) + reopen(1, 3, 0) + ask(0, 0, 0)
    yield reopen(0, 2, 0) + save(0, 0, 64) + save(1, 0, 64) + save(2, 0, 64) + touch(0, 0, 0)
    yield write(3, 0, 0) + sound + write(1, 0, 15) + sound + reopen(0, 1, 0) + save(1, 0, 0)
    yield write(0, 0, 16) + sound + reopen(0, 0, 0) + ask(0, 0, 0) + load(0, 0, 0)
