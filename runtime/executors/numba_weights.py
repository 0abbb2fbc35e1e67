"""Repacks weights of every format into the few forms that the numba kernels read.

Owns: those forms and how a block format becomes one. Must not know: ops or kernels. No block
layout is decoded here: a block with some bytes replaced, run through the format's own decoder,
yields its codes, scales and offsets one at a time (weight = scale * (code - bias) + offset).

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
from typing import NamedTuple

import numpy as np

from ...quant.formats import FORMATS, Format
from ..errors import ModelError
from ..weights import WeightSource, finite_values, not_finite

LANES = 16  # rows of a tile: the lanes of a vector
BLOCK = 32  # weights that share an activation scale
_SLICE_WEIGHTS = 1 << 18  # repacked at a time, so that temporary arrays stay in the caches
_CACHE_LINE = 64
_HALF_ONE = (0x00, 0x3C)  # bytes of the half float 1.0


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


Fill = tuple[int, int, int]  # first byte, end, value


@dataclass(frozen=True)
class Recipe:
    """How to make a block show one of its parts."""

    bias: int  # stored code = signed code + bias
    is_nibbles: bool
    quants: tuple[Fill, ...]  # makes every signed code 1
    d: int = 0  # place of the half float that scales the block
    offset: int = -1  # place of the half float that scales the offsets
    scales: tuple[Fill, ...] = ()  # makes every sub-scale 1
    has_halves: bool = False

    @property
    def form(self) -> tuple[int, bool, bool, bool]:
        """Weights of one form can stand in one matrix."""
        return self.bias, self.is_nibbles, self.has_halves, self.offset >= 0


RECIPES: dict[str, Recipe] = {
    "Q4_0": Recipe(8, True, ((2, 18, 0x99),)),
    "Q4_1": Recipe(0, True, ((4, 20, 0x11),), offset=2),
    "Q5_0": Recipe(128, False, ((2, 6, 0xFF), (6, 22, 0x11))),
    "Q5_1": Recipe(0, False, ((4, 8, 0x00), (8, 24, 0x11)), offset=2),
    "Q8_0": Recipe(128, False, ((2, 34, 0x01),)),
    "Q2_K": Recipe(
        0, True, ((16, 80, 0x55),), d=80, offset=82, scales=((0, 16, 0x01),), has_halves=True
    ),
    "Q3_K": Recipe(
        8,
        True,
        ((0, 32, 0xFF), (32, 96, 0x55)),
        d=108,
        scales=((96, 104, 0x11), (104, 108, 0xAA)),
        has_halves=True,
    ),
    "Q4_K": Recipe(0, True, ((16, 144, 0x11),), offset=2, scales=((4, 16, 0x01),)),
    "Q5_K": Recipe(0, False, ((16, 48, 0x00), (48, 176, 0x11)), offset=2, scales=((4, 16, 0x01),)),
    "Q6_K": Recipe(
        128,
        False,
        ((0, 128, 0x11), (128, 192, 0xAA)),
        d=208,
        scales=((192, 208, 0x01),),
        has_halves=True,
    ),
    "IQ4_NL": Recipe(128, False, ((2, 18, 0x88),)),
    "IQ4_XS": Recipe(128, False, ((8, 136, 0x88),), scales=((2, 4, 0xAA), (4, 8, 0x11))),
}


def pack_quantized(names: Sequence[str], weights: WeightSource, n_threads: int) -> QuantizedMatrix:
    """The named weights, which share one form, as one matrix with their rows stacked."""
    sources = [_BlockRows.of(name, weights) for name in names]
    recipe, n_cols = sources[0].recipe, sources[0].n_cols
    n_rows = sum(source.n_rows for source in sources)
    n_tiles, n_blocks, n_scales = -(-n_rows // LANES), n_cols // BLOCK, 1 + recipe.has_halves
    block_bytes = LANES * BLOCK // (1 + recipe.is_nibbles)
    codes = aligned((n_tiles, n_blocks, block_bytes), np.uint8)
    scale = aligned((n_tiles, n_blocks, n_scales, LANES), np.float32)
    offset = aligned(scale.shape if recipe.offset >= 0 else (0,), np.float32)

    def pack(start: int) -> None:
        stop = start + step
        rows = _stacked(sources, start * LANES, stop * LANES)
        codes[start:stop] = _tile_codes(rows.codes, recipe.is_nibbles)
        scale[start:stop] = _tile_scales(rows.scale, n_blocks)
        if recipe.offset >= 0:
            offset[start:stop] = _tile_scales(rows.offset, n_blocks)

    step = max(1, _SLICE_WEIGHTS // (n_cols * LANES))
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(pack, range(0, n_tiles, step)))
    return QuantizedMatrix(
        codes.reshape(-1),
        scale.reshape(-1),
        offset.reshape(-1),
        recipe.bias,
        n_rows,
        n_cols,
        recipe.is_nibbles,
        recipe.has_halves,
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
    recipe: Recipe
    blocks: np.ndarray  # (n_rows, blocks of a row, bytes of a block) uint8
    n_cols: int

    @classmethod
    def of(cls, name: str, weights: WeightSource) -> _BlockRows:
        fmt, shape = FORMATS[weights.format_name(name)], weights.shape(name)
        if fmt.name not in RECIPES or shape is None:
            raise ModelError(f"the numba executor cannot multiply {name!r} of format {fmt.name}")
        blocks = np.asarray(weights.data(name)).reshape(math.prod(shape[:-1]), -1, fmt.nbytes)
        return cls(name, fmt, RECIPES[fmt.name], blocks, shape[-1])

    @property
    def n_rows(self) -> int:
        return len(self.blocks)

    def rows(self, start: int, stop: int) -> _Rows:
        r, unit = self.recipe, LANES if self.recipe.has_halves else BLOCK
        one, zero = _half_at(r.d, _HALF_ONE), _half_at(r.d, (0, 0))
        no_offset = _half_at(r.offset, (0, 0)) if r.offset >= 0 else ()
        blocks = self.blocks[start:stop]
        codes = self._decode(blocks, (*one, *no_offset, *r.scales)) + np.float32(r.bias)
        scale = self._decode(blocks, (*no_offset, *r.quants))[:, ::unit]
        offset = self._decode(blocks, zero)[:, ::unit] if r.offset >= 0 else scale[:, :0]
        is_bad = ~np.isfinite(scale)
        if r.offset >= 0:
            is_bad |= ~np.isfinite(offset)
        if is_bad.any():
            row, at = np.argwhere(is_bad)[0]
            raise not_finite(self.name, (start + row, at * unit))
        return _Rows(codes.astype(np.uint8), scale, offset)

    def _decode(self, blocks: np.ndarray, fills: Sequence[Fill]) -> np.ndarray:
        changed = blocks.copy()
        for start, end, value in fills:
            changed[:, :, start:end] = value
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales are refused by rows()
            values = self.format.decode(changed.reshape(-1, self.format.nbytes))
        return values.reshape(len(blocks), -1)


def _half_at(at: int, value: tuple[int, int]) -> tuple[Fill, Fill]:
    return (at, at + 1, value[0]), (at + 1, at + 2, value[1])


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
