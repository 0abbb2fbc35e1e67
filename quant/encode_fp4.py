"""Encodes rows as MXFP4 blocks.

Owns: the choice of a block's power of two. Must not know: files, threads. Weights that come from
such blocks keep their values.
"""

from __future__ import annotations

import numpy as np

from .blocks_fp4 import E8M0_MOST, FP4_VALUES, half_e8m0, pack_mxfp4

_BLOCK = 32
_STEPS = (0, 1, -1)  # from the power that the largest value suggests; the first of equals wins
_ORDER = np.argsort(FP4_VALUES, kind="stable").astype(np.uint8)  # of indices, by their values
_LEVELS = FP4_VALUES[_ORDER].astype(np.float32)
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def encode_mxfp4(rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 (n, cols) to uint8 (n, bytes of a row): of three powers of two the one with the least
    squared error, each weight going to its nearest value. importance, float32 (cols,), says how
    much the error of each column counts."""
    weights = np.ones(rows.shape[1], np.float32) if importance is None else importance
    counts = np.tile(weights.reshape(-1, _BLOCK), (len(rows), 1))
    x = rows.reshape(-1, _BLOCK)
    largest = np.abs(x).max(axis=1)
    # The largest value is 6 = 1.5·2^2, and frexp's fraction is below 1.
    base = np.where(largest > 0, np.frexp(largest)[1] - 3 + 127, 0)
    unit = half_e8m0(np.clip(base, 0, E8M0_MOST))[:, None]  # or squares would overflow
    best_error = np.full(len(x), np.inf, np.float32)
    best_e, best_q = np.zeros(len(x), np.uint8), np.zeros(x.shape, np.uint8)
    for step in _STEPS:
        e = np.clip(base + step, 0, E8M0_MOST).astype(np.uint8)
        d = half_e8m0(e)[:, None]
        level = np.searchsorted(_MIDDLES, x / d)
        error = (counts * ((x - d * _LEVELS[level]) / unit) ** 2).sum(axis=1)
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        best_e = np.where(is_better, e, best_e)
        best_q = np.where(is_better[:, None], _ORDER[level], best_q)
    return pack_mxfp4(best_e, best_q).reshape(len(rows), -1)
