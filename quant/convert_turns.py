"""Stacks of experts as gpt-oss stores them: gate and up take turns, and MXFP4 lies in two tensors.

Owns: their names and layouts, and parts of them with what a SourceTensor offers. Must not know:
configs, files, the rest of a layer. Layouts: `transformers` 5.24 (GptOssExperts, and
integrations/mxfp4.py for the packed ones).

    gate_up_proj         (experts, cols, 2·rows): columns 2r are row r of gate, 2r + 1 of up
    gate_up_proj_bias    (experts, 2·rows): values take turns alike
    gate_up_proj_blocks  (experts, 2·rows, cols / 32, 16) bytes: two weights each, low nibble first
    gate_up_proj_scales  (experts, 2·rows, cols / 32) bytes: exponents
    down_proj…           the same without turns
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .blocks_fp4 import FP4_VALUES, half_e8m0
from .errors import FileFormatError
from .safetensors_file import SourceTensor

BLOCK = 32
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
_TURNS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def is_packed(name: str) -> bool:
    """Whether a tensor holds blocks or scales, which are no weights by themselves."""
    match = _STACK.fullmatch(name)
    return match is not None and match[3] in ("_blocks", "_scales")


@dataclass(frozen=True, eq=False)
class TurnPart:
    """Rows first, first + step, … of every expert."""

    name: str
    source: SourceTensor
    first: int
    step: int
    shape: tuple[int, ...]  # (experts, rows, cols); of a bias (experts, rows)

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n_rows(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) > 2 else 1)

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """float32 (n, cols); the rows of an expert follow those of the last."""
        assert isinstance(index, slice)
        if len(self.shape) == 2:
            return self.source.rows(index)[:, self.first :: self.step]
        expert, row = np.divmod(np.arange(index.start, index.stop), self.shape[1])
        return self._of_experts(expert, self.first + self.step * row)

    def _of_experts(self, expert: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Stored transposed: an expert is read whole."""
        cols, found = self.shape[2], []
        for e in np.unique(expert):
            columns = self.source.rows(slice(e * cols, (e + 1) * cols))
            found.append(columns[:, row[expert == e]].T)
        return np.concatenate(found)


@dataclass(frozen=True, eq=False)
class PackedPart(TurnPart):
    """The same of MXFP4 blocks; `source` holds their codes."""

    scales: SourceTensor

    @property
    def dtype(self) -> str:
        return "MXFP4"

    def _of_experts(self, expert: np.ndarray, row: np.ndarray) -> np.ndarray:
        at = expert * self.scales.shape[1] + row
        n_blocks = self.shape[2] // BLOCK
        packed = self.source.data.reshape(-1, n_blocks, BLOCK // 2)[at]
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(at), n_blocks, BLOCK)
        scale = half_e8m0(self.scales.data.reshape(-1, n_blocks)[at])
        weights: np.ndarray = FP4_VALUES[codes] * scale[:, :, None]
        return weights.reshape(len(at), -1)


def unstacked(named: Mapping[str, SourceTensor]) -> dict[str, SourceTensor | TurnPart]:
    """The tensors with stacks of experts by the names that other models give to their parts."""
    found: dict[str, SourceTensor | TurnPart] = {}
    for name, tensor in named.items():
        match = _STACK.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        turns, kind = _TURNS[match[2]], match[3] or ""
        if kind == "_scales":
            if f"{match[1]}.{match[2]}_proj_blocks" not in named:
                raise FileFormatError(f"tensor {name!r} has no blocks beside it")
            continue
        for first, part in enumerate(turns):
            new = f"{match[1]}.{part}.{'bias' if kind == '_bias' else 'weight'}"
            found[new] = _part(new, name, kind, named, first, len(turns))
    return found


def _part(
    new: str, name: str, kind: str, named: Mapping[str, SourceTensor], first: int, step: int
) -> TurnPart:
    tensor = named[name]
    n_dims = {"_bias": 2, "_blocks": 4}.get(kind, 3)
    if len(tensor.shape) != n_dims:
        raise FileFormatError(f"tensor {name!r} has shape {tensor.shape}, expected {n_dims} sizes")
    if kind == "_bias":
        experts, rows = tensor.shape
        return TurnPart(new, tensor, first, step, (experts, rows // step))
    if kind != "_blocks":
        experts, cols, rows = tensor.shape
        return TurnPart(new, tensor, first, step, (experts, rows // step, cols))
    scales = named.get(name.removesuffix("_blocks") + "_scales")
    *sizes, n_bytes = tensor.shape
    is_bytes = tensor.dtype == "U8" and scales is not None and scales.dtype == "U8"
    if scales is None or not is_bytes or n_bytes != BLOCK // 2 or scales.shape != tuple(sizes):
        raise FileFormatError(
            f"tensor {name!r} of type {tensor.dtype} has shape {tensor.shape}, expected bytes "
            f"(…, {BLOCK // 2}) and a scale for each block of them"
        )
    experts, rows, n_blocks = sizes
    shape = (experts, rows // step, n_blocks * BLOCK)
    return PackedPart(new, tensor, first, step, shape, scales)
