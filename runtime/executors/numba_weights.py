"""Repacks weights of every format into the few forms that the numba kernels read.

Owns: those forms and how a block format becomes one. Must not know: ops, kernels or the layout of
blocks, which their formats take apart (weight = scale * (code - bias) + offset).

    codes   [tile of 16 rows][block of 32][group of 4][16 rows][4] unsigned bytes; where 4 bits do,
            byte i of a block holds code i in its low and code i + 256 in its high nibble
    scale   [tile][block][1 or 2][16 rows] float32; 2 where a scale serves 16 weights
    offset  as scale, or empty
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ...quant.formats import FORMATS, Format
from ..errors import ModelError
from ..weights import WeightSource, finite_values, not_finite

LANES = 16  # rows of a tile: the lanes of a vector
BLOCK = 32  # weights that share an activation scale
_SLICE_WEIGHTS = 1 << 18  # repacked at a time, so that temporary arrays stay in the caches
_CACHE_LINE = 64


class QuantizedMatrix(NamedTuple):
    codes: np.ndarray  # uint8, flat
    scale: np.ndarray  # float32, flat
    offset: np.ndarray  # float32, flat, may be empty
    bias: int
    n_rows: int
    n_cols: int
    is_nibbles: bool
    has_halves: bool


class FloatMatrix(NamedTuple):
    values: np.ndarray  # [tile][col][16 rows] float32, or uint16 with the bits of float16; flat
    n_rows: int
    n_cols: int


# Formats whose codes fit four bits once this is added. All others become bytes.
NIBBLE_BIAS = {"Q4_0": 8, "Q4_1": 0, "Q2_K": 0, "Q3_K": 8, "Q4_K": 0, "TQ1_0": 8, "TQ2_0": 8}
BYTE_BIAS = 128


class Form(NamedTuple):
    """Weights of one form can stand in one matrix."""

    bias: int  # stored code = signed code + bias
    is_nibbles: bool
    has_halves: bool  # a scale for every 16 weights
    has_offset: bool


@cache
def form_of(format_name: str) -> Form:
    """Of a block format."""
    fmt = FORMATS[format_name]
    if fmt.parts is None:
        raise ModelError(f"weights of format {format_name} are no blocks")
    parts = fmt.parts(np.zeros((1, fmt.nbytes), np.uint8))
    bias, is_nibbles = NIBBLE_BIAS.get(format_name, BYTE_BIAS), format_name in NIBBLE_BIAS
    has_halves = fmt.block // parts.scale.shape[1] == LANES
    return Form(bias, is_nibbles, has_halves, parts.offset is not None)


def pack_quantized(names: Sequence[str], weights: WeightSource, n_threads: int) -> QuantizedMatrix:
    """The named weights, which share one form, as one matrix with their rows stacked."""
    sources = [_BlockRows.of(name, weights) for name in names]
    form, n_cols = sources[0].form, sources[0].n_cols
    n_rows = sum(source.n_rows for source in sources)
    n_tiles, n_blocks, n_scales = -(-n_rows // LANES), n_cols // BLOCK, 1 + form.has_halves
    block_bytes = LANES * BLOCK // (1 + form.is_nibbles)
    codes = aligned((n_tiles, n_blocks, block_bytes), np.uint8)
    scale = aligned((n_tiles, n_blocks, n_scales, LANES), np.float32)
    offset = aligned(scale.shape if form.has_offset else (0,), np.float32)

    def pack(start: int) -> None:
        stop = start + step
        rows = _stacked(sources, start * LANES, stop * LANES)
        codes[start:stop] = _tile_codes(rows.codes, form.is_nibbles)
        scale[start:stop] = _tile_scales(rows.scale, n_blocks)
        if form.has_offset:
            offset[start:stop] = _tile_scales(rows.offset, n_blocks)

    step = max(1, _SLICE_WEIGHTS // (n_cols * LANES))
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(pack, range(0, n_tiles, step)))
    return QuantizedMatrix(
        codes.reshape(-1),
        scale.reshape(-1),
        offset.reshape(-1),
        form.bias,
        n_rows,
        n_cols,
        form.is_nibbles,
        form.has_halves,
    )


def pack_floats(names: Sequence[str], weights: WeightSource) -> FloatMatrix:
    """The named F32, F16 or BF16 weights with their rows stacked; F16 alone stays 16 bits."""
    n_cols = (weights.shape(names[0]) or (0, 0))[-1]
    if all(weights.format_name(name) == "F16" for name in names):
        parts = [_finite_halves(name, weights) for name in names]
    else:
        parts = [finite_values(weights, name) for name in names]
    rows = np.concatenate([part.reshape(-1, n_cols) for part in parts])
    n_tiles = -(-len(rows) // LANES)
    values = aligned((n_tiles, n_cols, LANES), rows.dtype)
    values[...] = _padded(rows).reshape(n_tiles, LANES, n_cols).transpose(0, 2, 1)
    return FloatMatrix(values.reshape(-1), len(rows), n_cols)


def _finite_halves(name: str, weights: WeightSource) -> np.ndarray:
    """The bits of a weight of float16, flat."""
    bits = np.asarray(weights.data(name)).view(np.uint16)
    if (bits & 0x7C00 == 0x7C00).any():  # NaN and infinity: all ones in the exponent
        finite_values(weights, name)
    return bits


def aligned(shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array that starts on a cache line."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(n_bytes + _CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


class _Rows(NamedTuple):
    codes: np.ndarray  # (n_rows, n_cols) uint8
    scale: np.ndarray  # (n_rows, n_cols / weights per scale) float32
    offset: np.ndarray  # as scale, or (n_rows, 0)


@dataclass(frozen=True)
class _BlockRows:
    """One weight's rows of blocks."""

    name: str
    format: Format
    form: Form
    blocks: np.ndarray  # (n_rows, blocks of a row, bytes of a block) uint8
    n_cols: int

    @classmethod
    def of(cls, name: str, weights: WeightSource) -> _BlockRows:
        fmt, shape = FORMATS[weights.format_name(name)], weights.shape(name)
        if shape is None:
            raise KeyError(name)
        blocks = np.asarray(weights.data(name)).reshape(math.prod(shape[:-1]), -1, fmt.nbytes)
        return cls(name, fmt, form_of(fmt.name), blocks, shape[-1])

    @property
    def n_rows(self) -> int:
        return len(self.blocks)

    def rows(self, start: int, stop: int) -> _Rows:
        blocks = self.blocks[start:stop]
        assert self.format.parts is not None  # as there is a form
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales are refused below
            parts = self.format.parts(blocks.reshape(-1, self.format.nbytes))
        unit = LANES if self.form.has_halves else BLOCK
        scale = self._of_rows(parts.scale, len(blocks), unit)
        offset = scale[:, :0]
        is_bad = ~np.isfinite(scale)
        if parts.offset is not None:
            offset = self._of_rows(parts.offset, len(blocks), unit)
            is_bad |= ~np.isfinite(offset)
        if is_bad.any():
            row, at = np.argwhere(is_bad)[0]
            raise not_finite(self.name, (start + row, at * unit))
        codes = (parts.codes + np.int16(self.form.bias)).astype(np.uint8)
        return _Rows(codes.reshape(len(blocks), -1), scale, offset)

    def _of_rows(self, values: np.ndarray, n_rows: int, unit: int) -> np.ndarray:
        """Values of blocks as values of every `unit` weights of the rows."""
        repeats = self.format.block // values.shape[1] // unit
        return np.repeat(values, repeats, axis=1).reshape(n_rows, -1)


def _stacked(sources: Sequence[_BlockRows], start: int, stop: int) -> _Rows:
    """Rows start … stop - 1 of the stacked weights, up to the last."""
    parts = []
    for source in sources:
        if start < source.n_rows and stop > 0:
            parts.append(source.rows(max(start, 0), stop))
        start, stop = start - source.n_rows, stop - source.n_rows
    return _Rows(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _padded(rows: np.ndarray) -> np.ndarray:
    """Zero rows appended up to a whole tile."""
    return np.pad(rows, ((0, -len(rows) % LANES), (0, 0)))


def _tile_codes(codes: np.ndarray, is_nibbles: bool) -> np.ndarray:
    rows = _padded(codes)
    n_tiles, n_blocks = len(rows) // LANES, rows.shape[1] // BLOCK
    tiles = rows.reshape(n_tiles, LANES, n_blocks, BLOCK // 4, 4).transpose(0, 2, 3, 1, 4)
    tiles = tiles.reshape(n_tiles, n_blocks, LANES * BLOCK)
    if is_nibbles:
        half = LANES * BLOCK // 2
        tiles = tiles[:, :, :half] | (tiles[:, :, half:] << 4)
    return tiles


def _tile_scales(scale: np.ndarray, n_blocks: int) -> np.ndarray:
    rows = _padded(scale)
    return rows.reshape(len(rows) // LANES, LANES, n_blocks, -1).transpose(0, 2, 3, 1)
