"""Mixture of experts for the numba executor: the router's kernel, and products expert by expert.

Owns: the order of pairs of row and expert, and which rows each expert's products take. Must not
know: plans, steps or block formats. Products are those of numba_matmul, called once for every
expert that a row of the step has chosen, on a copy of its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from ...quant.kernel_cache import cached_kernel
from .numba_math import Q8Views
from .numba_matmul import linear_float, linear_quantized
from .numba_weights import BLOCK, LANES, FloatMatrix, QuantizedMatrix

_SIGMOID, _CHOSEN = 1, 2
_kernel = cached_kernel(parallel=True, nogil=True)
_inside = njit(nogil=True)


@_inside
def _best_of(values: np.ndarray, taken: np.ndarray) -> int:
    """The largest that is not yet taken, the first among equals."""
    best = -1
    for i in range(values.size):
        if not taken[i] and (best < 0 or values[i] > values[best]):
            best = i
    return best


@_inside
def _softmax(x: np.ndarray) -> None:
    most, total = x.max(), np.float32(0)
    for i in range(x.size):
        x[i] = np.float32(math.exp(x[i] - most))
        total += x[i]
    for i in range(x.size):
        x[i] /= total


@_inside
def _drop_groups(scores: np.ndarray, groups: int, used: int, taken: np.ndarray) -> None:
    size = scores.size // groups
    worth, is_kept = np.empty(groups, np.float32), np.zeros(groups, np.bool_)
    for g in range(groups):
        seen, of_group = np.zeros(size, np.bool_), scores[g * size : (g + 1) * size]
        first = _best_of(of_group, seen)
        seen[first] = True
        worth[g] = of_group[first] + (of_group[_best_of(of_group, seen)] if size > 1 else 0)
    for _ in range(used):
        is_kept[_best_of(worth, is_kept)] = True
    for i in range(scores.size):
        taken[i] = not is_kept[i // size]


@_kernel
def router(
    logits: np.ndarray,
    bias: np.ndarray,
    gating: int,
    used: int,
    groups: int,
    groups_used: int,
    renormalizes: bool,
    scale: float,
    shares: np.ndarray,
    out: np.ndarray,
    n_rows: int,
) -> None:
    """out (max_rows, [ids | weights]); bias and shares are empty or one value per expert."""
    for row in prange(n_rows):
        p = logits[row].copy()
        if gating == _SIGMOID:
            for i in range(p.size):
                p[i] = np.float32(1 / (1 + math.exp(-p[i])))
        elif gating != _CHOSEN:
            _softmax(p)
        scores, taken = p.copy(), np.zeros(p.size, np.bool_)
        if bias.size > 0:
            scores += bias
        if groups > 1:
            _drop_groups(scores, groups, groups_used, taken)
        is_chosen = np.zeros(p.size, np.bool_)
        for _ in range(used):
            best = _best_of(scores, taken)
            taken[best] = is_chosen[best] = True
        at, weights = 0, out[row, used:]
        for i in range(p.size):
            if is_chosen[i]:
                out[row, at], weights[at] = i, p[i]
                at += 1
        if gating == _CHOSEN:
            _softmax(weights)
        total = weights.sum() + np.float32(1e-20) if renormalizes else np.float32(1)
        for i in range(used):
            weights[i] = weights[i] / total * np.float32(scale)
            if shares.size > 0:
                weights[i] *= shares[int(out[row, i])]


class Pairs(NamedTuple):
    """Rows and experts they have chosen, sorted by expert, then by row."""

    rows: np.ndarray  # (n_pairs)
    weights: np.ndarray  # (n_pairs) float32
    of_expert: list[tuple[int, slice]]  # experts that have pairs, and which


def sorted_pairs(chosen: np.ndarray, n_rows: int) -> Pairs:
    """chosen (max_rows, [ids | weights]) as the router leaves it."""
    used = chosen.shape[1] // 2
    ids = chosen[:n_rows, :used].astype(np.intp).reshape(-1)
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids)
    ends = np.cumsum(counts)
    of_expert = [
        (int(e), slice(int(ends[e] - counts[e]), int(ends[e]))) for e in counts.nonzero()[0]
    ]
    return Pairs(order // used, chosen[:n_rows, used:].reshape(-1)[order], of_expert)


Matrix = QuantizedMatrix | FloatMatrix


@dataclass(frozen=True)
class ExpertMatrix:
    """A stacked weight, cut into the matrices of its experts."""

    matrices: list[Matrix]
    biases: list[np.ndarray]  # (rows) float32 of each expert, or empty

    @classmethod
    def of(cls, stacked: Matrix, bias: np.ndarray, n_experts: int) -> ExpertMatrix:
        """Rows of an expert are a multiple of 16, so that its tiles are its own."""
        n_rows = stacked.n_rows // n_experts
        biases = np.split(bias, n_experts)
        return cls([_rows_of(stacked, e * n_rows, n_rows) for e in range(n_experts)], biases)

    def multiply(
        self, expert: int, x: np.ndarray, q8: Q8Views, rest: Q8Views, out: np.ndarray, col: int
    ) -> None:
        """Rows of one expert: out[:, col:] = x @ w.T + b. Quantized weights read q8 and rest."""
        w, bias, n = self.matrices[expert], self.biases[expert], len(out)
        if isinstance(w, QuantizedMatrix):
            linear_quantized(w, bias, q8, rest, n, out, col, False)
        else:
            linear_float(w, bias, x, n, out, col, False)


def _rows_of(w: Matrix, first: int, n_rows: int) -> Matrix:
    tiles, n_blocks = slice(first // LANES, (first + n_rows) // LANES), w.n_cols // BLOCK

    def cut(values: np.ndarray, per_tile: int) -> np.ndarray:
        return values[tiles.start * per_tile : tiles.stop * per_tile]

    if isinstance(w, FloatMatrix):
        return FloatMatrix(cut(w.values, w.n_cols * LANES), n_rows, w.n_cols)
    n_scales = n_blocks * LANES * (1 + w.has_halves)
    codes = cut(w.codes, n_blocks * LANES * BLOCK // (1 + w.is_nibbles))
    offset = cut(w.offset, n_scales)
    return w._replace(codes=codes, scale=cut(w.scale, n_scales), offset=offset, n_rows=n_rows)


def taken(rows: np.ndarray, index: np.ndarray | slice) -> np.ndarray:
    """Rows of a buffer; an empty one, which stands for none, stays so."""
    return rows[index] if rows.size else rows


def taken_q8(q8: Q8Views, index: np.ndarray | slice) -> Q8Views:
    if not q8.codes.size:
        return q8
    codes = np.ascontiguousarray(q8.codes[index])
    return Q8Views(codes, codes.view(np.int32), codes.view(np.float32))
