"""What a text says of stacks of matrices: experts, and heads of latent attention.
Owns: a stack's importance and its estimates; must not know budgets, trials, files. Of each matrix
squares alone are known, as few rows may have reached it: they weigh errors, and nothing is fed
back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from martlet.quant.allocate import Choice
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize
from martlet.runtime.calibration_stacks import StackSquares
from martlet.runtime.weights import WeightSource

SAMPLE_ROWS = 16  # of each matrix, whose errors stand for all rows


@dataclass
class Stack:
    """Weights float32 (matrices, rows, cols), each matrix with an input of its own."""

    name: str
    shape: tuple[int, int, int]
    inputs: StackSquares
    errors: dict[str, float] = field(default_factory=dict)
    """Format -> error of the outputs per token, summed over matrices and rows."""
    sensitivity: float = 0.0  # KL divergence per layer error

    @property
    def importance(self) -> np.ndarray:
        """float32 (matrices, cols), as a quant.quantize.Plan takes it."""
        return self.inputs.means().astype(np.float32)

    def error(self, values: np.ndarray, rounded: np.ndarray) -> float:
        """Σ e² E[x²] per token: a matrix counts as often as it is used."""
        squares = self.inputs.squares / max(self.inputs.n_tokens, 1)
        lost = ((values - rounded).astype(np.float64) ** 2).sum(axis=1)
        return float((lost * squares).sum()) * self.shape[1] / values.shape[1]

    def choices(self) -> list[Choice]:
        return [
            Choice(name, FORMATS[name].data_bytes(self.shape), self.cost(name))
            for name in self.errors
        ]

    def cost(self, format_name: str) -> float:
        """Expected KL divergence in nats per token."""
        return self.sensitivity * self.errors[format_name]


def stacks_of(sums: Sequence[StackSquares], weights: WeightSource) -> list[Stack]:
    found = []
    for squares in sums:
        for name in squares.weights:
            n, rows, cols = weights.shape(name) or (0, 0, 0)
            found.append(Stack(name, (n, rows, cols), squares))
    return found


def estimate_stack_errors(
    stacks: Sequence[Stack], weights: WeightSource, formats_for: Callable[[int], Sequence[str]]
) -> None:
    """Fills errors from a sample of the rows of each matrix."""
    for stack in stacks:
        _, rows, cols = stack.shape
        taken = np.arange(min(rows, SAMPLE_ROWS)) * rows // min(rows, SAMPLE_ROWS)
        values = weights.dequantized(stack.name)[:, taken]
        for name in formats_for(cols):
            rounded = np.stack(
                [
                    dequantize(encode(part, name, w).reshape(-1), FORMATS[name], part.shape)
                    for part, w in zip(values, stack.importance, strict=True)
                ]
            )
            stack.errors[name] = stack.error(values, rounded)
