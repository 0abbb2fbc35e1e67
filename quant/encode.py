"""Encodes whole matrices: float32 rows to the bytes of any format, with the least squared error.

Owns: checks on the weights, pieces, threads. Must not know: how a block is fitted (`grid.py`),
files, which tensor gets which format. A row is encoded without regard to others, so the bytes do
not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .blocks_legacy import pack_bf16, pack_f16, pack_f32
from .encode_fp4 import encode_mxfp4
from .errors import FileFormatError, UnsupportedError
from .formats import FORMATS
from .grid import GRIDS, Grid, fit_blocks, pack

PIECE_WEIGHTS = 1 << 18  # a thread's share at a time: the temporaries of packing stay in its cache
LARGEST_HALF = 65504.0

_PLAIN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": pack_f32,
    "F16": pack_f16,
    "BF16": pack_bf16,
}
# The largest magnitude a format can hold; those not named are bound by their half floats.
_LARGEST = {
    "F32": float(np.finfo(np.float32).max),
    "BF16": 3.3895313892515355e38,
    "MXFP4": 6 * 2.0**124,
}
ENCODABLE = (*_PLAIN, *GRIDS, "MXFP4")


class BadWeights(FileFormatError):
    """Weights that no format can hold: not finite, or too large for its floats."""


def encode(
    values: np.ndarray,
    format_name: str,
    importance: np.ndarray | None = None,
    *,
    threads: int | None = None,
    first_row: int = 0,
) -> np.ndarray:
    """float32 (rows, cols) to uint8 (rows, row_bytes) of `format_name`.

    importance, float32 (cols,), says how much the squared error of each column counts, as the mean
    square of the input that meets it; None: all alike. Block formats minimise Σ importance·error²
    block by block. The same bytes come out whatever the number of threads (None: all cores).
    first_row is what messages count the first row as, for callers that encode a matrix in parts.
    Raises BadWeights with the place of a weight that cannot be stored, FileFormatError where cols
    is no multiple of the block, UnsupportedError for an unknown format.
    """
    if format_name not in ENCODABLE:
        raise UnsupportedError(
            f"martlet writes no {format_name!r}; it writes {', '.join(ENCODABLE)}"
        )
    rows, cols = values.shape
    row_bytes = FORMATS[format_name].data_bytes((cols,))
    weights = None if importance is None else _checked_importance(importance, cols)
    out = np.empty((rows, row_bytes), np.uint8)

    def one_piece(start: int, stop: int) -> None:
        piece = np.ascontiguousarray(values[start:stop], np.float32)
        check_weights(piece, format_name, first_row + start)
        out[start:stop] = _encode_piece(piece, format_name, weights)

    pieces = pieces_of(rows, cols)
    n_threads = min(threads or os.cpu_count() or 1, len(pieces))
    if n_threads <= 1:
        for piece in pieces:
            one_piece(*piece)
    else:
        with threads_of(n_threads) as pool:
            for future in [pool.submit(one_piece, *piece) for piece in pieces]:
                future.result()  # raises the first failure in order of rows
    return out


def pieces_of(rows: int, cols: int) -> list[tuple[int, int]]:
    """(first row, row behind the last) of each piece of a matrix; the same for all threads."""
    step = max(1, PIECE_WEIGHTS // cols)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


@contextlib.contextmanager
def threads_of(n: int | None) -> Iterator[ThreadPoolExecutor]:
    """n threads, or as many as there are cores; what none has begun at the end is forgotten."""
    pool = ThreadPoolExecutor(n or os.cpu_count() or 1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def compiled_ahead(
    format_names: Iterable[str], pool: ThreadPoolExecutor
) -> Iterator[Callable[[str], None]]:
    """Inside, one of these threads compiles the kernels of these formats where they are not kept
    from another run, and the others may encode. Yields what waits for the kernel of a format.

    Who encodes without that waits for numba's lock, which is not handed over between kernels: for
    all of them.
    """
    compiled = {name: threading.Event() for name in format_names if name in GRIDS}
    is_over = threading.Event()

    def compile_all() -> None:
        try:
            for name, is_compiled in compiled.items():
                if not is_over.is_set():
                    grid = GRIDS[name]
                    fit_blocks(np.zeros((1, grid.block), np.float32), grid)
                is_compiled.set()
        finally:  # who encodes meets the same failure
            for is_compiled in compiled.values():
                is_compiled.set()

    def wait_for(name: str) -> None:
        if name in compiled:
            compiled[name].wait()

    pool.submit(compile_all)
    try:
        yield wait_for
    finally:
        is_over.set()


def _encode_piece(piece: np.ndarray, format_name: str, weights: np.ndarray | None) -> np.ndarray:
    if format_name == "MXFP4":
        return encode_mxfp4(piece, weights)
    if format_name in _PLAIN:
        return _PLAIN[format_name](piece)
    grid: Grid = GRIDS[format_name]
    blocks = piece.reshape(-1, grid.block)
    scales, q = fit_blocks(blocks, grid, weights)
    return pack(scales, q).reshape(len(piece), -1)


def _checked_importance(importance: np.ndarray, cols: int) -> np.ndarray:
    if importance.shape != (cols,):
        raise FileFormatError(
            f"importance has shape {importance.shape}, the matrix has {cols} columns"
        )
    weights = np.asarray(importance, np.float32)
    is_bad = ~(np.isfinite(weights) & (weights >= 0))
    if is_bad.any():
        at = int(np.argmax(is_bad))
        raise FileFormatError(
            f"importance of column {at} is {importance[at]}, must be ≥ 0 and finite"
        )
    return weights


def check_weights(piece: np.ndarray, format_name: str, first_row: int = 0) -> None:
    """Raises BadWeights for the first of float32 (rows, cols) that the format cannot hold."""
    largest = _LARGEST.get(format_name, LARGEST_HALF)
    # NaN compares false; one pass decides, the place is searched only when there is one.
    if np.abs(piece).max(initial=0) <= largest:
        return
    row, col = np.argwhere(~(np.abs(piece) <= largest))[0]
    value = piece[row, col]
    reason = f"{format_name} holds up to {largest:g}" if np.isfinite(value) else "not finite"
    raise BadWeights(f"weight [{first_row + row}, {col}] is {value}: {reason}")
