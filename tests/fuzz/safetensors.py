"""Safetensors files: refused with a typed error, or every tensor can be read row by row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from martlet.quant.errors import MartletError
from martlet.quant.safetensors_file import SafetensorsFile

from .memory_file import MemoryFile

FILE = MemoryFile()
MOST_BYTES = 2048


def run(data: bytes) -> None:
    with contextlib.suppress(MartletError):
        file = SafetensorsFile.open(FILE.holding(data))
        for tensor in file.tensors.values():
            tensor.check_convertible()
            with np.errstate(all="ignore"):
                rows = tensor.rows(slice(0, 4))
            assert rows.dtype == np.float32


def seeds() -> Iterator[bytes]:
    def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    for header, n_bytes in (
        ({}, 0),
        ({"a": entry("F32", [2, 3], 0, 24)}, 24),
        ({"a": entry("BF16", [4], 0, 8), "b": entry("F16", [3, 1, 2], 8, 20)}, 20),
        ({"a": entry("I64", [1], 0, 8), "b": entry("F16", [0, 2], 8, 8)}, 8),
        ({"__metadata__": {"format": "pt"}, "é": entry("F32", [], 0, 4)}, 4),
    ):
        raw = json.dumps(header).encode()
        yield len(raw).to_bytes(8, "little") + raw + bytes(range(n_bytes))
