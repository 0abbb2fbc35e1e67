"""Where executors get the values of weights: by name, as raw blocks or as float32.

Owns: the WeightSource protocol, weights held in memory or in an open GGUF file, a view that shows
blocks as plain floats, and the refusal of values that are no numbers. Must not know:
architectures, plans or how kernels repack blocks.
"""

from __future__ import annotations

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


class StoredWeights:
    """Weights in a mapping from names to tensors: `GGUFFile.tensors`, or StoredTensors."""

    def __init__(self, tensors: Mapping[str, TensorLike]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[name].shape if name in self._tensors else None

    def format_name(self, name: str) -> str:
        return self._tensors[name].format.name

    def data(self, name: str) -> np.ndarray:
        return self._tensors[name].data

    def dequantized(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.format, tensor.shape)


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
