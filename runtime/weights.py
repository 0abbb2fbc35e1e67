"""Where executors get the values of weights: by name, as raw blocks or as float32.

Owns: the WeightSource protocol, weights held in memory or in an open GGUF file, a view that shows
blocks as plain floats, and the refusal of values that are no numbers. Must not know:
architectures, plans or how kernels repack blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..quant.formats import FORMATS, Format, dequantize
from .errors import FileFormatError


class WeightSource(Protocol):
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """(rows, cols) or (values,); None where there is no such weight."""
        ...

    def format_name(self, name: str) -> str: ...

    def data(self, name: str) -> np.ndarray:
        """The weight's blocks as they stand in the file, uint8 (n_bytes,)."""
        ...

    def dequantized(self, name: str) -> np.ndarray:
        """The weight as a new float32 array of its shape."""
        ...


def not_finite(name: str, index: Iterable[int]) -> FileFormatError:
    """The refusal of a weight that is NaN or infinite: it would reach every token's logits."""
    place = ", ".join(str(int(i)) for i in index)
    return FileFormatError(
        f"tensor {name!r} holds a value that is not finite at [{place}]; "
        "the file is damaged or its conversion failed: fetch or convert it again"
    )


def finite_values(weights: WeightSource, name: str) -> np.ndarray:
    """The weight as a new float32 array, refused where a value is NaN or infinite."""
    values = weights.dequantized(name)
    if not np.isfinite(values).all():
        raise not_finite(name, np.argwhere(~np.isfinite(values))[0])
    return values


def decoded_rows(weights: WeightSource, name: str, rows: np.ndarray) -> np.ndarray:
    """Some rows of a matrix, (len(rows), cols) float32; the others are not touched."""
    fmt, (n_rows, cols) = FORMATS[weights.format_name(name)], weights.shape(name) or (0, 0)
    data = weights.data(name).reshape(n_rows, -1)[rows]
    return dequantize(np.ascontiguousarray(data).reshape(-1), fmt, (len(rows), cols))


class TensorLike(Protocol):
    """What a tensor of a GGUF file and a StoredTensor have in common."""

    @property
    def format(self) -> Format: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    format: Format
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 (n_bytes,)

    @classmethod
    def from_floats(cls, values: np.ndarray) -> StoredTensor:
        values = np.ascontiguousarray(values, np.float32)
        return cls(FORMATS["F32"], values.shape, values.reshape(-1).view(np.uint8))


_ROW_RUNS = re.compile(r"(.+)\[(?P<first>\d+):(?P<stop>\d+)/(?P<every>\d+)\](\..+)")


def row_runs(stem: str, first: int, stop: int, every: int) -> str:
    """The stem of a weight made of rows first … stop - 1 of every `every` rows of another: heads of
    one kind that stand in turn with those of another."""
    return f"{stem}[{first}:{stop}/{every}]"


_CHOSEN = "[chosen]"


def chosen_rows(name: str) -> str:
    """What ChosenRows calls the rows that it has chosen of a weight."""
    stem, dot, end = name.rpartition(".")
    return f"{stem}{_CHOSEN}{dot}{end}"


def stored_name(name: str) -> str:
    """Of the tensor that a weight is, or is made of."""
    name = name.replace(_CHOSEN, "")
    match = _ROW_RUNS.fullmatch(name)
    return match[1] + match[5] if match else name


class StoredWeights:
    """Weights in a mapping from names to tensors: `GGUFFile.tensors`, or StoredTensors."""

    def __init__(self, tensors: Mapping[str, TensorLike]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._find(name)
        return found.shape if found else None

    def format_name(self, name: str) -> str:
        return self._tensor(name).format.name

    def data(self, name: str) -> np.ndarray:
        return self._tensor(name).data

    def dequantized(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        return dequantize(tensor.data, tensor.format, tensor.shape)

    def _tensor(self, name: str) -> TensorLike:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def _find(self, name: str) -> TensorLike | None:
        if name in self._tensors:
            return self._tensors[name]
        match = _ROW_RUNS.fullmatch(name)
        whole = self._tensors.get(stored_name(name)) if match else None
        if not match or whole is None:
            return None
        first, stop, every = (int(match[key]) for key in ("first", "stop", "every"))
        rows, *cols = whole.shape
        if not first < stop <= every or rows % every:
            return None  # as if it were missing: the recorder's sizes do not fit this file
        runs = whole.data.reshape(rows // every, every, -1)[:, first:stop]
        shape = (rows // every * (stop - first), *cols)
        return StoredTensor(whole.format, shape, np.ascontiguousarray(runs).reshape(-1))


class DequantizedWeights:
    """Shows every block-format weight of a source as F32, so that only float rounding remains."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(name)

    def format_name(self, name: str) -> str:
        stored = self._source.format_name(name)
        return stored if FORMATS[stored].block == 1 else "F32"

    def data(self, name: str) -> np.ndarray:
        if self.format_name(name) == self._source.format_name(name):
            return self._source.data(name)
        return self.dequantized(name).reshape(-1).view(np.uint8)

    def dequantized(self, name: str) -> np.ndarray:
        return self._source.dequantized(name)


class ChosenRows:
    """Shows, beside every weight of a source, some of its rows under the name of chosen_rows."""

    def __init__(self, source: WeightSource, rows: np.ndarray) -> None:
        """rows: (n) int, of the matrices that are asked for by such a name."""
        self._source, self._rows = source, rows

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...] | None:
        shape = self._source.shape(stored_name(name) if _CHOSEN in name else name)
        return (len(self._rows), *shape[1:]) if shape and _CHOSEN in name else shape

    def format_name(self, name: str) -> str:
        return self._source.format_name(stored_name(name) if _CHOSEN in name else name)

    def data(self, name: str) -> np.ndarray:
        if _CHOSEN not in name:
            return self._source.data(name)
        whole = stored_name(name)
        n_rows = (self._source.shape(whole) or (0,))[0]
        blocks = self._source.data(whole).reshape(n_rows, -1)[self._rows]
        return np.ascontiguousarray(blocks).reshape(-1)

    def dequantized(self, name: str) -> np.ndarray:
        if _CHOSEN not in name:
            return self._source.dequantized(name)
        fmt, shape = FORMATS[self.format_name(name)], self.shape(name)
        assert shape
        return dequantize(self.data(name), fmt, shape)
