"""Files of the prefix cache: a block comes out only where fingerprint, tokens and checksum agree.

The first byte says what is done to a sound file; the rest is a file of its own, or what is changed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from martlet.runtime.prefix_store import HEADER, MAGIC, SUFFIX, PrefixStore

MOST_BYTES = 512
TOKENS, BLOCK, DIGEST = bytes(range(64)), b"keys and values " * 4, b"\xab" * 16
FINGERPRINT = b"model"


def _folder() -> Path:
    memory = Path("/dev/shm")
    kept = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    return Path(kept)


FOLDER = _folder()
PATH = FOLDER / (DIGEST.hex() + SUFFIX)


def _sound() -> bytes:
    store = PrefixStore(FOLDER, FINGERPRINT)
    store.save(DIGEST, lambda: TOKENS, lambda: BLOCK)
    store.close()
    return PATH.read_bytes()


SOUND = _sound()


def run(data: bytes) -> None:
    raw = bytearray(SOUND)
    if not data:
        return
    if data[0] % 2:
        raw[:] = data[1:]
    else:
        for at, byte in zip(data[1::2], data[2::2], strict=False):
            raw[at % len(raw)] ^= byte
    PATH.write_bytes(raw)
    store = PrefixStore(FOLDER, FINGERPRINT)
    try:
        block = store.load(DIGEST, TOKENS)
        assert block is None or (block == BLOCK and raw == SOUND)
        assert PATH.exists() == (block is not None)
        store.has_of_others(TOKENS)
    finally:
        store.close()


def seeds() -> Iterator[bytes]:
    yield b"\1" + SOUND
    yield b"\0" + bytes(2)
    yield b"\0\5\1"
    yield b"\1" + HEADER.pack(MAGIC, b"x" * 32, 8, 8) + bytes(32)
    yield b"\1" + HEADER.pack(MAGIC, b"x" * 32, 2**32 - 1, 2**64 - 1)
