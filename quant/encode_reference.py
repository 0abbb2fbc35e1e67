"""The fit of a block in plain NumPy: slow, dense, and easy to check.

Owns: what the kernels of `encode_legacy.py` and `encode_k.py` are to find, with the signature of
`grid.Fit`. Must not know: bytes, files. For tests; works in float64 and spends no thought on speed.
"""

from __future__ import annotations

import itertools

import numpy as np

from .grid import GRIDS, Grid

_SCALES = np.linspace(0.6, 1.4, 81)  # of the scale that fills the levels exactly
_SHIFTS = np.linspace(-1, 1, 7)  # levels
_REACH = 2  # of the integer scales, to either side
_ROUNDS = 4


def fit(
    format_name: str,
    x: np.ndarray,
    w: np.ndarray,
    d: np.ndarray,
    m: np.ndarray,
    s: np.ndarray,
    o: np.ndarray,
    q: np.ndarray,
) -> None:
    """As `grid.Fit`, for the format of this name."""
    grid = GRIDS[format_name]
    for b in range(len(d)):
        at = slice(b * grid.subs, (b + 1) * grid.subs)
        weights = w[np.arange(at.start, at.stop) % len(w)].astype(np.float64)
        values = x[at].astype(np.float64)
        if "s" in grid.fields:
            d[b], m[b], s[b], o[b] = _super_block(grid, values, weights)
        else:
            d[b], m[b] = _plain_block(grid, values[0], weights[0])
        steps, offsets = d[b] * s[b], -m[b] * o[b] if "o" in grid.fields else m[b] + 0 * o[b]
        for j in range(grid.subs):
            q[at.start + j] = _nearest(grid, values[j], steps[j], offsets[j])


def _nearest(grid: Grid, x: np.ndarray, step: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Indices of levels; step and offset broadcast against x."""
    inverse = np.divide(1, step, out=np.zeros(np.shape(step)), where=np.asarray(step) != 0)
    middles = (grid.levels[1:] + grid.levels[:-1]) / 2
    return np.searchsorted(middles, (x - offset) * inverse)


def _error(grid: Grid, x: np.ndarray, w: np.ndarray, step: float, offset: float) -> float:
    levels = grid.levels[_nearest(grid, x, np.float64(step), np.float64(offset))]
    return float((w * (x - step * levels - offset) ** 2).sum())


def _best(grid: Grid, x: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """(step, offset) of one run of weights, in real numbers."""
    has_offset = "m" in grid.fields
    span = np.abs(x).max() if not has_offset else np.ptp(np.append(x, 0) if _is_low(grid) else x)
    if not span:
        return 0.0, float(x[0]) if has_offset and not _is_low(grid) else 0.0
    low = min(x.min(), 0) if _is_low(grid) else x.min()
    full = np.ptp(grid.levels) if has_offset else np.abs(grid.levels).max()
    tried = (_SCALES * full / span)[:, None]
    candidates = [(tried, 0 * tried), (-tried, 0 * tried)]
    if has_offset:
        candidates = [(tried, low + shift / tried) for shift in _SHIFTS]
    best = (np.inf, 0.0, 0.0)
    for inverse, offset in candidates:
        levels = grid.levels[_nearest(grid, x, 1 / inverse, offset)].astype(np.float64)
        for row in levels:
            step, at = _least_squares(row, x, w, has_offset, _is_low(grid))
            error = _error(grid, x, w, step, at)
            best = min(best, (error, step, at))
    return best[1], best[2]


def _is_low(grid: Grid) -> bool:
    return "o" in grid.fields


def _least_squares(
    q: np.ndarray, x: np.ndarray, w: np.ndarray, has_offset: bool, is_low: bool
) -> tuple[float, float]:
    """The step and offset with the least Σ w (x - step·q - offset)²."""
    if has_offset and np.ptp(q):
        root = np.sqrt(w)
        columns = np.stack((q * root, root), axis=1)
        step, offset = np.linalg.lstsq(columns, x * root, rcond=None)[0]
        if not (is_low and offset > 0):
            return float(step), float(offset)
    square = (w * q * q).sum()
    return (float((w * q * x).sum() / square) if square else 0.0), 0.0


def _half(value: float) -> float:
    return float(np.float16(np.clip(value, -65504, 65504)))


def _plain_block(grid: Grid, x: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    step, offset = _best(grid, x, w)
    d = _half(step)
    if "m" not in grid.fields:
        return d, 0.0
    q = grid.levels[_nearest(grid, x, np.float64(d), np.float64(offset))]
    return d, _half((w * (x - d * q)).sum() / w.sum())


def _super_block(
    grid: Grid, x: np.ndarray, w: np.ndarray
) -> tuple[float, float, np.ndarray, np.ndarray]:
    least, most = grid.scales
    wished = np.array([_best(grid, x[j], w[j]) for j in range(grid.subs)])
    widest = wished[np.argmax(np.abs(wished[:, 0])), 0]
    found: tuple[float, float, float, np.ndarray, np.ndarray] | None = None
    for end in (least, most) if least else (most,):
        d, m = _half(widest / end), _half(-wished[:, 1].min() / most)
        s = np.clip(np.rint(wished[:, 0] / d if d else 0 * wished[:, 0]), least, most)
        o = np.clip(np.rint(-wished[:, 1] / m if m else 0 * wished[:, 1]), 0, most)
        for _ in range(_ROUNDS):
            total = 0.0
            for j in range(grid.subs):
                error, s[j], o[j] = _best_integers(grid, x[j], w[j], d, m, s[j], o[j])
                total += error
            if found is None or total < found[0]:
                found = total, d, m, s.copy(), o.copy()
            d, m = _refit(grid, x, w, d, m, s, o)
    assert found is not None
    return found[1], found[2], found[3], found[4]


def _best_integers(
    grid: Grid, x: np.ndarray, w: np.ndarray, d: float, m: float, s: float, o: float
) -> tuple[float, float, float]:
    reach = np.arange(-_REACH, _REACH + 1)
    least, most = grid.scales
    tried_s = np.unique(np.clip(s + reach, least, most))
    tried_o = np.unique(np.clip(o + reach, 0, most)) if "o" in grid.fields else np.zeros(1)
    return min(
        (_error(grid, x, w, d * t, -m * u), t, u) for t, u in itertools.product(tried_s, tried_o)
    )


def _refit(
    grid: Grid, x: np.ndarray, w: np.ndarray, d: float, m: float, s: np.ndarray, o: np.ndarray
) -> tuple[float, float]:
    """The half floats that are best for all integers as they are."""
    steps, offsets = d * s[:, None], -m * o[:, None]
    levels = grid.levels[_nearest(grid, x, steps, offsets)].astype(np.float64)
    root = np.sqrt(w)
    columns = np.stack([(s[:, None] * levels * root).ravel(), (-o[:, None] * root).ravel()], axis=1)
    solution = np.linalg.lstsq(columns, (x * root).ravel(), rcond=None)[0]
    return _half(solution[0]), _half(solution[1])
