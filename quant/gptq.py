"""Rounds a matrix so that errors of neighbours make up for each other on the inputs it meets.

Owns: the order of fitting, rounding, feedback and descent, and the shrinking of a second moment
that few tokens gave. Must not know: models, texts, files, which format a tensor should have.

The error of a row is e H eT with e = w - rounded w and H = E[x xT], see `runtime/calibration.py`.
Columns are rounded from left to right, and what a column lost is put onto those that follow, as
GPTQ does (Frantar et al., arXiv 2210.17323); then single codes are moved where that lowers the
error (coordinate descent, as CDQuant, arXiv 2406.17542), and steps are solved for anew, block by
block. Scales of a block are fitted when its columns come up, on what the feedback made of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .formats import FORMATS
from .gptq_kernels import descend, refit, round_block
from .grid import BlockScales, Grid, find_grid, fit_blocks, pack

# Rows that a thread takes at a time; fixed, so that bytes are the same for any number of threads.
# With 128 two threads took longer than one: they waited for each other between short calls.
PIECE_ROWS = 512
ERROR_ROWS = 4096  # whose errors are float64 at once
DAMPING = 0.01  # of the mean diagonal, on top of it
SHRINKAGES = (0.03, 0.1, 0.3)  # candidates; 1 is rounding without feedback
ROUNDS = 3  # of descent and refit over all blocks
SWEEPS = 2  # over the columns of a block, of one descent


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
    """float32 (rows, cols) to uint8 (rows, row_bytes), the same for any number of threads."""
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
    """Block by block, so that only products of matrices touch more columns than a block has."""
    rows, cols = values.shape
    blocks = [slice(start, start + grid.block) for start in range(0, cols, grid.block)]
    codes = [np.empty(0, np.uint8)] * len(blocks)
    scales: list[BlockScales] = []
    lost = np.empty((rows, cols), np.float32)
    for b, here in enumerate(blocks):
        before = slice(0, here.start)
        shifted = values[:, here] - lost[:, before] @ feedback.spread[before, here]
        fitted, _ = fit_blocks(shifted, grid, feedback.importance[here])
        codes[b], lost[:, here] = round_block(
            shifted, *_levers(fitted), grid.levels, grid.sub, feedback.spread[here, here]
        )
        scales.append(fitted)
    error = np.empty_like(lost)
    for b, here in enumerate(blocks):
        error[:, here] = values[:, here] - _decoded(scales[b], codes[b])
    for _ in range(ROUNDS):
        for b, here in enumerate(blocks):
            moment = np.ascontiguousarray(feedback.moment[here, here])
            gradient = error @ feedback.moment[:, here]
            _descend(gradient, moment, scales[b], codes[b])
            scales[b] = _refitted(gradient, moment, scales[b], codes[b])
            _descend(gradient, moment, scales[b], codes[b])
            error[:, here] = values[:, here] - _decoded(scales[b], codes[b])
    return np.concatenate([pack(s, c) for s, c in zip(scales, codes, strict=True)], axis=1)


def _levers(scales: BlockScales) -> tuple[np.ndarray, np.ndarray]:
    """Step and offset, float32 (blocks, sub-blocks)."""
    return scales.step, np.ascontiguousarray(scales.offset)


def _levels_at(scales: BlockScales, codes: np.ndarray) -> np.ndarray:
    """float32 (blocks, sub-blocks, sub)."""
    return scales.grid.levels[codes].reshape(len(codes), scales.grid.subs, scales.grid.sub)


def _decoded(scales: BlockScales, codes: np.ndarray) -> np.ndarray:
    """The weights that codes uint8 (blocks, block) stand for, float32 of their shape."""
    step, offset = _levers(scales)
    return (step[:, :, None] * _levels_at(scales, codes) + offset[:, :, None]).reshape(codes.shape)


def _descend(
    gradient: np.ndarray, moment: np.ndarray, scales: BlockScales, codes: np.ndarray
) -> None:
    """Moves codes of a block; gradient (rows, block), e H in its columns, follows."""
    descend(gradient, moment, *_levers(scales), scales.grid.levels, scales.grid.sub, codes, SWEEPS)


def _refitted(
    gradient: np.ndarray, moment: np.ndarray, scales: BlockScales, codes: np.ndarray
) -> BlockScales:
    """d and m solved for anew with all integers as they are; the gradient follows."""
    grid = scales.grid
    by_d = (scales.s.astype(np.float32)[:, :, None] * _levels_at(scales, codes)).reshape(
        codes.shape
    )
    o = -scales.o.astype(np.float32) if "o" in grid.fields else np.ones_like(scales.s, np.float32)
    by_m = np.repeat(o, grid.sub, axis=1)
    d, m = scales.d.copy(), scales.m.copy()
    refit(gradient, by_d, by_m, by_d @ moment, by_m @ moment, "m" in grid.fields, d, m)
    return BlockScales(grid, d, m, scales.s, scales.o)
