"""Writes imatrix files of both forms, byte by byte or by the GGUF writer; knows no reader."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from martlet.quant.formats import FORMATS
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_write import OutTensor, write_gguf


def write_imatrix(
    path: Path, sums: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> None:
    """sums float32 (matrices, cols), counts float32 (matrices, 1), by tensor."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": ["some.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    values = {f"{name}.in_sum2": v for name, v in sums.items()}
    values |= {f"{name}.counts": v for name, v in counts.items()}
    tensors = [
        OutTensor(name, v.shape, FORMATS["F32"], lambda v=v: v.astype(np.float32))  # type: ignore[misc]
        for name, v in values.items()
    ]
    write_gguf(path, {key: Field.of(value) for key, value in metadata.items()}, tensors)


def legacy_imatrix(entries: Mapping[str, tuple[int, np.ndarray]], trailer: bytes = b"") -> bytes:
    """entries: tensor -> (calls, values float32 (n,))."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        parts.append(struct.pack("<i", len(name)) + name.encode())
        parts.append(struct.pack("<ii", calls, len(values)) + values.astype("<f4").tobytes())
    return b"".join(parts) + trailer
