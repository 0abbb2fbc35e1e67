"""Writes imatrix files of both forms, byte by byte or by the writer of martlet; knows no reader."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from martlet.quant import imatrix


def write_imatrix(
    path: Path, sums: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> None:
    """sums float32 (matrices, cols), counts float32 (matrices, 1), by tensor."""
    about = {"dataset": "some.txt", "n_chunks": 3, "chunk_tokens": 512}
    imatrix.write_imatrix(path, sums, counts, **about)  # type: ignore[arg-type]


def legacy_imatrix(entries: Mapping[str, tuple[int, np.ndarray]], trailer: bytes = b"") -> bytes:
    """entries: tensor -> (calls, values float32 (n,))."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        parts.append(struct.pack("<i", len(name)) + name.encode())
        parts.append(struct.pack("<ii", calls, len(values)) + values.astype("<f4").tobytes())
    return b"".join(parts) + trailer
