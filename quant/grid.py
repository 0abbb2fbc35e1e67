"""Block formats as grids: which values a block can hold once its scales are chosen.

Owns: for every block format its levels, sub-blocks, fitting kernel and packer, behind one shape:

    weight = step·level + offset,   step = d·s,   offset = m  or  -m·o

d and m are half floats of a block; s and o are integers of a sub-block (1 and 0 where the format
has none). Must not know: tensors, rows, threads, files. `encode.py` builds whole tensors on this;
a quantizer with error feedback fits scales, rounds column by column, and packs what it chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import blocks_iq, blocks_k, blocks_legacy, encode_k, encode_legacy
from .errors import UnsupportedError
from .formats import FORMATS

# How little a weight may count beside the most important one of its block: enough to keep the
# sums of a fit away from 0 / 0, too little to move a scale.
LEAST_IMPORTANCE = np.float32(1e-6)

# (x, w, d, m, s, o, q): weights x float32 (n·subs, sub) and their importance w float32
# (k·subs, sub), block b taking rows of w as if they repeated; filled are d, m float32 (n,),
# s, o int16 (n, subs) and q uint8 (n·subs, sub).
Fit = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Grid:
    """What a block of one format can hold."""

    name: str
    sub: int  # weights that share a step and an offset
    levels: np.ndarray  # float32, ascending; the stored integer is the index
    fit: Fit
    pack: Callable[..., np.ndarray]
    fields: str  # what the packer takes before q, of "d", "m", "s", "o"
    scales: tuple[int, int] = (1, 1)  # the least and the largest s; o goes from 0 to the largest

    @property
    def block(self) -> int:
        return FORMATS[self.name].block

    @property
    def subs(self) -> int:
        return self.block // self.sub


def _whole(low: int, top: int) -> np.ndarray:
    return np.arange(low, top + 1, dtype=np.float32)


GRIDS: dict[str, Grid] = {
    grid.name: grid
    for grid in (
        Grid("Q4_0", 32, _whole(-8, 7), encode_legacy.fit_q4_0, blocks_legacy.pack_q4_0, "d"),
        Grid("Q4_1", 32, _whole(0, 15), encode_legacy.fit_q4_1, blocks_legacy.pack_q4_1, "dm"),
        Grid("Q5_0", 32, _whole(-16, 15), encode_legacy.fit_q5_0, blocks_legacy.pack_q5_0, "d"),
        Grid("Q5_1", 32, _whole(0, 31), encode_legacy.fit_q5_1, blocks_legacy.pack_q5_1, "dm"),
        Grid("Q8_0", 32, _whole(-127, 127), encode_legacy.fit_q8_0, blocks_legacy.pack_q8_0, "d"),
        Grid("Q2_K", 16, _whole(0, 3), encode_k.fit_q2_k, blocks_k.pack_q2_k, "dmso", (0, 15)),
        Grid("Q3_K", 16, _whole(-4, 3), encode_k.fit_q3_k, blocks_k.pack_q3_k, "ds", (-32, 31)),
        Grid("Q4_K", 32, _whole(0, 15), encode_k.fit_q4_k, blocks_k.pack_q4_k, "dmso", (0, 63)),
        Grid("Q5_K", 32, _whole(0, 31), encode_k.fit_q5_k, blocks_k.pack_q5_k, "dmso", (0, 63)),
        Grid("Q6_K", 16, _whole(-32, 31), encode_k.fit_q6_k, blocks_k.pack_q6_k, "ds", (-128, 127)),
        Grid(
            "IQ4_NL", 32, blocks_iq.IQ4_VALUES, encode_legacy.fit_iq4_nl, blocks_legacy.pack_q4_0,
            "d",
        ),
        Grid(
            "IQ4_XS", 32, blocks_iq.IQ4_VALUES, encode_k.fit_iq4_xs, blocks_iq.pack_iq4_xs,
            "ds", (-32, 31),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class BlockScales:
    """All that n blocks store besides the integers of their weights."""

    grid: Grid
    d: np.ndarray  # float32 (n,), values that are half floats
    m: np.ndarray  # float32 (n,), values that are half floats
    s: np.ndarray  # int16 (n, subs)
    o: np.ndarray  # int16 (n, subs)

    @property
    def step(self) -> np.ndarray:
        """float32 (n, subs), as the decoder computes it."""
        return self.d[:, None] * self.s.astype(np.float32)

    @property
    def offset(self) -> np.ndarray:
        """float32 (n, subs), as the decoder computes it."""
        if "o" in self.grid.fields:
            return -(self.m[:, None] * self.o.astype(np.float32))
        return np.broadcast_to(self.m[:, None], self.s.shape)


def find_grid(format_name: str) -> Grid:
    if format_name not in GRIDS:
        raise UnsupportedError(
            f"{format_name} has no blocks to fit; formats that have: {', '.join(GRIDS)}"
        )
    return GRIDS[format_name]


def fit_block_scales(
    values: np.ndarray, format_name: str, weights: np.ndarray | None = None
) -> BlockScales:
    """Scales for float32 (n, block) values, each block for itself.

    weights, float32 (block,) or (n, block), say how much each squared error counts; None: all
    alike. The scales minimise Σ weights·error² when every value goes to its nearest level.
    """
    return fit_blocks(values, find_grid(format_name), weights)[0]


def fit_blocks(
    values: np.ndarray, grid: Grid, weights: np.ndarray | None = None
) -> tuple[BlockScales, np.ndarray]:
    """As `fit_block_scales`, and the integers uint8 (n, block) of the nearest levels."""
    n = len(values)
    w = np.ones((1, grid.block), np.float32) if weights is None else _sound_weights(weights, grid)
    x = np.ascontiguousarray(values, np.float32).reshape(n * grid.subs, grid.sub)
    scales = BlockScales(
        grid,
        np.zeros(n, np.float32),
        np.zeros(n, np.float32),
        np.ones((n, grid.subs), np.int16),
        np.zeros((n, grid.subs), np.int16),
    )
    q = np.empty((n * grid.subs, grid.sub), np.uint8)
    grid.fit(x, w.reshape(-1, grid.sub), scales.d, scales.m, scales.s, scales.o, q)
    return scales, q.reshape(n, grid.block)


def _sound_weights(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """float32 (k, block), the largest of a block 1; a block of nothing but zeros counts evenly."""
    w = np.array(weights, np.float32).reshape(-1, grid.block)
    largest = w.max(axis=1, keepdims=True)
    w /= np.where(largest > 0, largest, 1)
    return np.where(largest > 0, np.maximum(w, LEAST_IMPORTANCE), np.float32(1))


def round_to_grid(column: np.ndarray, scales: BlockScales, j: int) -> tuple[np.ndarray, np.ndarray]:
    """The level of weight j of every block nearest to float32 (n,) values.

    Returns the integers uint8 (n,) and the weights float32 (n,) they decode to, to the bit.
    """
    sub, levels = j // scales.grid.sub, scales.grid.levels
    step, offset = scales.step[:, sub], scales.offset[:, sub]
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    wanted = (column - offset) * inverse
    middles = (levels[1:] + levels[:-1]) / 2
    q = np.searchsorted(middles, wanted).astype(np.uint8)
    return q, step * levels[q] + offset


def pack(scales: BlockScales, integers: np.ndarray) -> np.ndarray:
    """uint8 (n, nbytes): the blocks with these scales and integers uint8 (n, block)."""
    return scales.grid.pack(*(getattr(scales, field) for field in scales.grid.fields), integers)
