"""Rounds a matrix so that errors of neighbours make up for each other on the inputs it meets.

Owns: the order of fitting, rounding, feedback and descent, and the shrinking of a second moment
that few tokens gave. Must not know: models, texts, files, which format a tensor should have.

The error of a row is e H eT with e = w - rounded w and H = E[x xT], see `runtime/calibration.py`.
Columns are rounded from left to right, and what a column lost is put onto those that follow, as
GPTQ does (Frantar et al., arXiv 2210.17323); then single codes are moved where that lowers the
error (coordinate descent, as CDQuant, arXiv 2406.17542), and steps are solved for anew. Scales of
a block are fitted when its columns come up, on what the feedback made of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .formats import FORMATS
from .gptq_kernels import descend, refit, round_block, spread
from .grid import BlockScales, Grid, find_grid, fit_blocks, pack

PIECE_ROWS = 128  # rows that a thread takes at a time; fixed, so that bytes are the same for all
ERROR_ROWS = 4096  # whose errors are float64 at once
DAMPING = 0.01  # of the mean diagonal, on top of it
SHRINKAGES = (0.03, 0.1, 0.3)  # candidates; 1 is rounding without feedback
ROUNDS = 2  # of descent and refit
SWEEPS = 2  # over all columns, of one descent


@dataclass(frozen=True)
class Feedback:
    """What rounding needs of a second moment, computed once for all matrices that read the input.

    moment float32 (n, n): H with its off-diagonal part shrunk, damped; spread float32 (n, n): the
    upper triangular U with inverse(H) = UT U, rows divided by their diagonal; importance float32
    (n,): what an error costs in a column once those behind it have made up for it, 1 / U_jj^2.
    """

    moment: np.ndarray
    spread: np.ndarray
    importance: np.ndarray

    @classmethod
    def of(cls, moment: np.ndarray, shrinkage: float) -> Feedback:
        """moment: float64 (n, n), E[x xT]; shrinkage 0 … 1 of what lies off its diagonal."""
        diagonal = moment.diagonal().copy()
        damped = (1 - shrinkage) * moment
        damping = DAMPING * diagonal.mean() or 1.0  # an input that is always zero
        np.fill_diagonal(damped, diagonal + damping)
        upper = np.linalg.cholesky(np.linalg.inv(damped)).T
        pivots = upper.diagonal()
        return cls(
            damped.astype(np.float32),
            np.ascontiguousarray(upper / pivots[:, None], np.float32),
            (1 / pivots**2).astype(np.float32),
        )


def layer_error(values: np.ndarray, rounded: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """e H eT of every row, float64 (rows,)."""
    out = np.empty(len(values))
    for start in range(0, len(values), ERROR_ROWS):
        piece = slice(start, start + ERROR_ROWS)
        error = (values[piece] - rounded[piece]).astype(np.float64)
        out[piece] = np.einsum("ij,ij->i", error @ moment, error)
    return out


def quantize_rows(
    values: np.ndarray, format_name: str, feedback: Feedback, *, threads: int | None = None
) -> np.ndarray:
    """float32 (rows, cols) to uint8 (rows, row_bytes); a row does not depend on the others."""
    grid = find_grid(format_name)
    rows = len(values)
    out = np.empty((rows, FORMATS[format_name].data_bytes((values.shape[1],))), np.uint8)

    def one_piece(start: int) -> None:
        piece = np.ascontiguousarray(values[start : start + PIECE_ROWS], np.float32)
        out[start : start + PIECE_ROWS] = _quantize_piece(piece, grid, feedback)

    starts = range(0, rows, PIECE_ROWS)
    with ThreadPoolExecutor(min(threads or os.cpu_count() or 1, len(starts))) as pool:
        list(pool.map(one_piece, starts))  # raises the first failure in order of rows
    return out


def _quantize_piece(values: np.ndarray, grid: Grid, feedback: Feedback) -> np.ndarray:
    rows, cols = values.shape
    n_blocks = cols // grid.block
    shifted = values.copy()
    codes = np.empty((rows, cols), np.uint8)
    fitted: list[BlockScales] = []
    lost = np.empty((rows, grid.block), np.float32)
    for block in range(n_blocks):
        here = slice(block * grid.block, (block + 1) * grid.block)
        scales, _ = fit_blocks(shifted[:, here], grid, feedback.importance[here])
        args = scales.step, np.ascontiguousarray(scales.offset), grid.levels, grid.sub
        round_block(shifted, here.start, *args, feedback.spread, codes, lost)
        spread(shifted, here.start, lost, feedback.spread)
        fitted.append(scales)
    scales = _joined(fitted, grid)
    for _ in range(ROUNDS):
        _descend(values, scales, codes, feedback.moment)
        scales = _refitted(values, scales, codes, feedback.moment)
    _descend(values, scales, codes, feedback.moment)
    return pack(scales, codes.reshape(-1, grid.block)).reshape(rows, -1)


def _joined(fitted: Sequence[BlockScales], grid: Grid) -> BlockScales:
    """Scales of blocks that lie one behind the other in every row."""
    parts = [np.stack([getattr(f, k) for f in fitted], axis=1) for k in "dmso"]
    d, m, s, o = (np.ascontiguousarray(p.reshape(-1, *p.shape[2:])) for p in parts)
    return BlockScales(grid, d, m, s, o)


def _levels_at(scales: BlockScales, codes: np.ndarray) -> np.ndarray:
    """What the codes decode to, float32 of their shape."""
    grid = scales.grid
    levels = grid.levels[codes].reshape(len(scales.d), grid.subs, grid.sub)
    return (scales.step[:, :, None] * levels + scales.offset[:, :, None]).reshape(codes.shape)


def _descend(
    values: np.ndarray, scales: BlockScales, codes: np.ndarray, moment: np.ndarray
) -> None:
    error = values - _levels_at(scales, codes)
    rows = len(values)
    step, offset = (np.ascontiguousarray(a).reshape(rows, -1) for a in (scales.step, scales.offset))
    grid = scales.grid
    descend(error @ moment, moment, step, offset, grid.levels, grid.sub, codes, SWEEPS)


def _refitted(
    values: np.ndarray, scales: BlockScales, codes: np.ndarray, moment: np.ndarray
) -> BlockScales:
    """d and m solved for anew with all integers as they are, block by block."""
    grid, rows = scales.grid, len(values)
    gradient = (values - _levels_at(scales, codes)) @ moment
    levels = grid.levels[codes].reshape(len(scales.d), grid.subs, grid.sub)
    by_d = (scales.s.astype(np.float32)[:, :, None] * levels).reshape(rows, -1)
    has_m = "m" in grid.fields
    o = -scales.o.astype(np.float32) if "o" in grid.fields else np.ones_like(scales.s, np.float32)
    by_m = np.repeat(o, grid.sub, axis=1).reshape(rows, -1)
    d, m = (a.reshape(rows, -1).copy() for a in (scales.d, scales.m))
    refit(gradient, moment, by_d, by_m, grid.block, has_m, d, m)
    return BlockScales(grid, d.reshape(-1), m.reshape(-1), scales.s, scales.o)
