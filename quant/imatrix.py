"""Importance from llama.cpp's imatrix files: how much the error of each input channel counts.

Owns: both forms of the file, the GGUF one and the older `.dat`. Must not know: formats of weights,
or what is done with the numbers. Layouts: llama.cpp's `common/imatrix-loader.cpp`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileFormatError
from .formats import FORMATS, dequantize
from .gguf_field import Field
from .gguf_file import GGUFFile
from .gguf_write import OutTensor, write_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Imatrix:
    """E[x_j²] of every input channel j of each tensor: float32 (matrices, cols).

    A tensor has one matrix, or one for each expert.
    """

    importance: dict[str, np.ndarray]
    datasets: list[str]
    n_chunks: int


def write_imatrix(
    path: str | PathLike[str],
    sums: Mapping[str, np.ndarray],
    counts: Mapping[str, np.ndarray],
    *,
    dataset: str,
    n_chunks: int,
    chunk_tokens: int,
) -> None:
    """The GGUF form, for llama-quantize too: of each tensor the sums of squares (matrices, cols)
    of what it multiplied, and how many rows went into them, (matrices, 1)."""
    fields = {
        "general.type": Field.string("imatrix"),
        "imatrix.datasets": Field.strings([dataset]),
        "imatrix.chunk_count": Field.uint32(n_chunks),
        "imatrix.chunk_size": Field.uint32(chunk_tokens),
    }
    values = {name + _SUMS: sums[name] for name in sorted(sums)}
    values |= {name + _COUNTS: counts[name] for name in sorted(sums)}
    tensors = [
        OutTensor(name, v.shape, FORMATS["F32"], partial(np.asarray, v, np.float32))
        for name, v in values.items()
    ]
    write_gguf(path, fields, tensors)


def read_imatrix(path: str | PathLike[str]) -> Imatrix:
    """Raises FileFormatError for a file of neither form."""
    path = Path(path)
    with open(path, "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    return _read_gguf(path) if is_gguf else _read_legacy(path)


def _read_gguf(path: Path) -> Imatrix:
    with GGUFFile.open(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise FileFormatError(f"{path}: is a GGUF file, but not an imatrix")
        values = {t.name: dequantize(t.data, t.format, t.shape) for t in file.tensors.values()}
        importance = {}
        for name in (name for name in values if name.endswith(_SUMS)):
            tensor = name.removesuffix(_SUMS)
            sums, counts = values[name], values.get(tensor + _COUNTS)
            if sums.ndim == 1:  # llama-imatrix writes a single matrix so
                sums = sums[None, :]
            if counts is None or sums.ndim != 2 or counts.size != len(sums):
                raise FileFormatError(f"{path}: {name} {sums.shape} has no counts for its matrices")
            if not (np.isfinite(counts) & (counts >= 0)).all():
                raise FileFormatError(f"{path}: the counts of {tensor} are not all finite and ≥ 0")
            counts = counts.reshape(-1, 1)
            # An expert that no token reached says nothing: even importance.
            means = _means(sums, np.where(counts > 0, counts, np.float32(1)))
            importance[tensor] = np.where(counts > 0, means, np.float32(1))
        datasets = file.metadata.get("imatrix.datasets", [])
        if not isinstance(datasets, list) or not all(isinstance(name, str) for name in datasets):
            raise FileFormatError(f"{path}: imatrix.datasets is not a list of names")
        return _checked(path, importance, datasets, file.metadata.get("imatrix.chunk_count", 0))


def _read_legacy(path: Path) -> Imatrix:
    """int32 count; for each: int32 length, name, int32 calls, int32 n, float32 sums (n); then, may
    be absent, int32 chunks, int32 length, data set. What is divided by the calls is the mean."""
    raw = path.read_bytes()
    at = 0

    def take(n_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= n_bytes <= len(raw) - at:
            raise FileFormatError(
                f"{path}: is no imatrix: {n_bytes} bytes wanted at byte {at} of {len(raw)}"
            )
        at += n_bytes
        return raw[at - n_bytes : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    def text() -> str:
        n_bytes = number()
        if n_bytes > _MAX_NAME_BYTES:
            raise FileFormatError(
                f"{path}: is no imatrix: a name of {n_bytes} bytes, at most {_MAX_NAME_BYTES}"
            )
        return take(n_bytes).decode("utf-8", "replace")

    importance = {}
    for _ in range(number()):
        name, calls, n = text(), number(), number()
        sums = np.frombuffer(take(4 * n), "<f4").astype(np.float32)
        importance[name] = _means(sums, np.float32(max(calls, 1))).reshape(1, -1)
    n_chunks = number() if at < len(raw) else 0
    datasets = [text()] if at < len(raw) else []
    return _checked(path, importance, datasets, n_chunks)


def _means(sums: np.ndarray, counts: np.ndarray | np.float32) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name
        return sums / counts


def _checked(
    path: Path, importance: dict[str, np.ndarray], datasets: list[str], n_chunks: Any
) -> Imatrix:
    if not importance:
        raise FileFormatError(f"{path}: holds no importance of any tensor")
    for name, values in importance.items():
        if not (np.isfinite(values) & (values >= 0)).all():
            raise FileFormatError(f"{path}: the importance of {name} is not all finite and ≥ 0")
    if type(n_chunks) is not int or not 0 <= n_chunks < 1 << 32:
        raise FileFormatError(f"{path}: claims {n_chunks!r:.80} chunks, expected a whole number")
    return Imatrix(importance, datasets, n_chunks)
