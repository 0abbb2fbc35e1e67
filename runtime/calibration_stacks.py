"""What each matrix of a stack meets on a text: mean squares of the input, matrix by matrix.

Owns: which rows a matrix of experts, or of a head, reads. Must not know: texts, files, quantizers;
products of single matrices are calibration.py's.

An expert reads only the rows that choose it, so every matrix has squares and a count of its own,
as llama.cpp's imatrix files hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .ops import BufferKind, OpKind
from .plan import Op, Plan
from .weights import stored_name

_STACKS_OF = {
    OpKind.EXPERT_GLU: ("gate", "up"),
    OpKind.EXPERT_SUM: ("down",),
    OpKind.HEAD_LINEAR: ("weight",),
}
PRIOR_ROWS = 16
# (buffer, number of rows) to float32 (rows, width), of the step that ran last
Read = Callable[[int, int], np.ndarray]


@dataclass
class StackSquares:
    """Sums over the rows x that enter each of the matrices of these weights."""

    weights: tuple[str, ...]
    n_tokens: int
    n_rows: np.ndarray
    """(matrices,) int64; 0: an expert that no row chose."""
    squares: np.ndarray
    """(matrices, cols) float64: sum of x^2 per channel."""

    def add(self, rows: np.ndarray, at: np.ndarray, n_tokens: int) -> None:
        """rows: (n, cols) float32, of which each goes through matrix `at`, (n,) int."""
        self.n_tokens += n_tokens
        self.n_rows += np.bincount(at, minlength=len(self.n_rows))
        for k in np.unique(at):
            mine = rows[at == k]
            self.squares[k] += np.einsum("ij,ij->j", mine, mine, dtype=np.float64)

    def means(self) -> np.ndarray:
        """E[x^2], float64 (matrices, cols), each as if some rows more had met the matrix, like
        those of all matrices together: few rows say little, and none nothing. Ones where there
        are no rows at all."""
        if not self.n_rows.any():
            return np.ones_like(self.squares)
        common = self.squares.sum(axis=0) / self.n_rows.sum()
        return (self.squares + PRIOR_ROWS * common) / (self.n_rows + PRIOR_ROWS)[:, None]


@dataclass(frozen=True)
class ObservedStack:
    """An op whose weights are stacks, and how its input becomes rows of single matrices."""

    op: Op
    weights: tuple[str, ...]
    n: int
    cols: int

    def empty(self) -> StackSquares:
        return StackSquares(
            self.weights, 0, np.zeros(self.n, np.int64), np.zeros((self.n, self.cols))
        )

    def add(self, read: Read, n_tokens: int, sums: StackSquares) -> None:
        x, inputs = self.op.inputs[0], self.op.inputs
        if self.op.kind is OpKind.HEAD_LINEAR:
            heads = read(x, n_tokens).reshape(n_tokens * self.n, -1)[:, : self.cols]
            sums.add(heads, np.tile(np.arange(self.n), n_tokens), n_tokens)
            return
        used = self.op.int_of("used")
        experts = read(inputs[2], n_tokens)[:, :used].astype(np.intp).reshape(-1)
        order = np.argsort(experts, kind="stable")  # of pairs, as expert_glu leaves them
        if self.op.kind is OpKind.EXPERT_GLU:
            rows = read(x, n_tokens)[order // used]
        else:
            rows = read(x, n_tokens * used)
        sums.add(rows, experts[order], n_tokens)


def observed_stacks(plan: Plan) -> list[ObservedStack]:
    """In the order of the plan; all their inputs are floats."""
    found = []
    for op in plan.ops:
        if op.kind not in _STACKS_OF:
            continue
        assert plan.buffers[op.inputs[0]].kind is BufferKind.F32, "the plan is recorded with f32"
        places = [at for field in _STACKS_OF[op.kind] if (at := op.weight_of(field)) >= 0]
        tensors = [plan.tensors[at] for at in places]
        n, _, cols = tensors[0].shape
        names = tuple(dict.fromkeys(stored_name(tensor.name) for tensor in tensors))
        found.append(ObservedStack(op, names, n, cols))
    return found
