"""Importance files of both forms: refused with a typed error, or finite numbers that are ≥ 0."""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from martlet.quant.errors import MartletError
from martlet.quant.imatrix import read_imatrix

from ..quant.imatrix_bytes import legacy_imatrix, write_imatrix
from .memory_file import MemoryFile

FILE = MemoryFile()
MOST_BYTES = 2048


def run(data: bytes) -> None:
    with contextlib.suppress(MartletError):
        found = read_imatrix(FILE.holding(data))
        for values in found.importance.values():
            assert values.ndim == 2
            assert np.isfinite(values).all()
            assert (values >= 0).all()


def seeds() -> Iterator[bytes]:
    ones = np.ones((1, 4), np.float32)
    trailer = struct.pack("<ii", 3, 4) + b"text"
    yield legacy_imatrix({"blk.0.ffn_up.weight": (2, ones[0])}, trailer)
    yield legacy_imatrix({"a": (0, ones[0]), "b": (1, ones[0, :0])})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        write_imatrix(path, {"a": ones, "b": ones}, {"a": ones[:, :1], "b": ones[:, :1]})
        yield path.read_bytes()
