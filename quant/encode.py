"""Encodes whole matrices: float32 rows to the bytes of any format, with the least squared error.

Owns: checks on the weights, pieces, threads. Must not know: how a block is fitted (`grid.py`),
files, which tensor gets which format. A row is encoded without regard to others, so the bytes do
not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .blocks_legacy import pack_bf16, pack_f16, pack_f32
from .errors import FileFormatError, UnsupportedError
from .formats import FORMATS
from .grid import GRIDS, Grid, fit_blocks, pack

PIECE_WEIGHTS = 1 << 17  # a thread's share at a time: the temporaries of packing stay in its cache
LARGEST_HALF = 65504.0

# The largest magnitude each plain format can hold; block formats are bound by their half floats.
_PLAIN: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "F32": (pack_f32, float(np.finfo(np.float32).max)),
    "F16": (pack_f16, LARGEST_HALF),
    "BF16": (pack_bf16, 3.3895313892515355e38),
}
ENCODABLE = (*_PLAIN, *GRIDS)


class BadWeights(FileFormatError):
    """Weights that no format can hold: not finite, or too large for its floats."""


def encode(
    values: np.ndarray,
    format_name: str,
    importance: np.ndarray | None = None,
    *,
    threads: int | None = None,
) -> np.ndarray:
    """float32 (rows, cols) to uint8 (rows, row_bytes) of `format_name`.

    importance, float32 (cols,), says how much the squared error of each column counts, as the mean
    square of the input that meets it; None: all alike. Block formats minimise Σ importance·error²
    block by block. The same bytes come out whatever the number of threads (None: all cores).
    Raises BadWeights with the place of a weight that cannot be stored, FileFormatError where cols
    is no multiple of the block, UnsupportedError for an unknown format.
    """
    if format_name not in ENCODABLE:
        raise UnsupportedError(
            f"martlet writes no {format_name!r}; it writes {', '.join(ENCODABLE)}"
        )
    rows, cols = values.shape
    row_bytes = FORMATS[format_name].data_bytes((cols,))
    largest = _PLAIN[format_name][1] if format_name in _PLAIN else LARGEST_HALF
    weights = None if importance is None else _checked_importance(importance, cols)
    out = np.empty((rows, row_bytes), np.uint8)
    step = max(1, PIECE_WEIGHTS // cols)

    def one_piece(start: int) -> None:
        piece = np.ascontiguousarray(values[start : start + step], np.float32)
        _check_weights(piece, largest, start, format_name)
        out[start : start + step] = _encode_piece(piece, format_name, weights)

    starts = range(0, rows, step)
    n_threads = min(threads or os.cpu_count() or 1, len(starts))
    if n_threads <= 1:
        for start in starts:
            one_piece(start)
        return out
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in pool.map(one_piece, starts):  # raises the first failure in order of rows
            pass
    return out


def _encode_piece(piece: np.ndarray, format_name: str, weights: np.ndarray | None) -> np.ndarray:
    if format_name in _PLAIN:
        return _PLAIN[format_name][0](piece)
    grid: Grid = GRIDS[format_name]
    blocks = piece.reshape(-1, grid.block)
    scales, q = fit_blocks(blocks, grid, weights)
    return pack(scales, q).reshape(len(piece), -1)


def _checked_importance(importance: np.ndarray, cols: int) -> np.ndarray:
    if importance.shape != (cols,):
        raise FileFormatError(
            f"importance has shape {importance.shape}, the matrix has {cols} columns"
        )
    if not np.isfinite(importance).all() or importance.min() < 0:
        at = int(np.flatnonzero(~np.isfinite(importance) | (importance < 0))[0])
        raise FileFormatError(f"importance of column {at} is {importance[at]}, must be ≥ 0")
    return np.asarray(importance, np.float32)


def _check_weights(piece: np.ndarray, largest: float, start: int, format_name: str) -> None:
    # NaN compares false; one pass decides, the place is searched only when there is one.
    if np.abs(piece).max(initial=0) <= largest:
        return
    row, col = np.argwhere(~(np.abs(piece) <= largest))[0]
    value = piece[row, col]
    reason = f"{format_name} holds up to {largest:g}" if np.isfinite(value) else "not finite"
    raise BadWeights(f"weight [{start + row}, {col}] is {value}: {reason}")
