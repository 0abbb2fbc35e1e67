"""What the weights of a model meet on a text: second moments of the input of every product.

Owns: running tokens with float activations and summing what each product reads. Must not know:
texts, files of statistics, or what a quantizer makes of the sums.

The error of a row w of a weight, rounded to v, is E[((w - v) x)^2] = (w - v) H (w - v)T with
H = E[x xT] over the tokens; its diagonal alone is what llama.cpp calls the importance matrix.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from .calibration_stacks import StackSquares, observed_stacks
from .config import ModelConfig
from .errors import ModelError
from .executors import Executor
from .executors.choice import create_executor
from .models import record_plan
from .ops import BufferKind, KvType, OpKind, RowKind
from .plan import Op, Plan
from .step import Step
from .weights import WeightSource, stored_name

_WEIGHTS_OF = {OpKind.LINEAR: ("w0", "w1", "w2"), OpKind.LINEAR_GLU: ("gate", "up")}
_BLOCK_TOKENS = 32
_MAX_ROWS = 512  # of a step: their products are summed in float32
_PANEL = 256  # columns of x xT that are computed at once, from the diagonal on


class Observable(Executor, Protocol):
    """An executor whose float buffers can be read after a step."""

    def read_rows(self, buffer: int, n_rows: int) -> np.ndarray: ...


@dataclass
class InputMoments:
    """Sums over the rows x that enter the products with these weights."""

    weights: tuple[str, ...]
    n_rows: int
    squares: np.ndarray
    """(cols) float64: sum of x^2 per channel."""
    upper: np.ndarray | None
    """(cols, cols) float64: sum of x xT, of which only what is not left of the diagonal's panel is
    filled; None where only squares were asked for."""

    @classmethod
    def empty(cls, weights: tuple[str, ...], cols: int, is_full: bool) -> InputMoments:
        return cls(weights, 0, np.zeros(cols), np.zeros((cols, cols)) if is_full else None)

    def add(self, rows: np.ndarray) -> None:
        """rows: (n, cols) float32. Products of one call are summed in float32."""
        self.n_rows += len(rows)
        self.squares += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        if self.upper is None:
            return
        for start in range(0, rows.shape[1], _PANEL):
            panel = slice(start, start + _PANEL)
            self.upper[panel, start:] += rows[:, panel].T @ rows[:, start:]

    def mean_products(self) -> np.ndarray:
        """E[x xT], float64 (cols, cols)."""
        if self.upper is None:
            raise ModelError("only squares of the rows were summed, not their products")
        upper = np.triu(self.upper)
        return (upper + np.triu(upper, 1).T) / max(self.n_rows, 1)

    def with_even(self, square: float) -> InputMoments:
        """As if every row had independent channels of this mean square on top."""
        if self.upper is None:
            raise ModelError("only squares of the rows were summed, not their products")
        added = square * self.n_rows
        upper = self.upper + added * np.eye(len(self.upper))
        return InputMoments(self.weights, self.n_rows, self.squares + added, upper)

    def joined(self, other: InputMoments) -> InputMoments:
        """The moments of both runs of rows together."""
        both = self.upper is not None and other.upper is not None
        upper = self.upper + other.upper if both else None  # type: ignore[operator]
        squares = self.squares + other.squares
        return InputMoments(self.weights, self.n_rows + other.n_rows, squares, upper)


class Calibrator:
    """Runs chunks of tokens, each from position 0, and sums the inputs of all products.

    full: keep whole second moments, cols^2 float64 for every distinct input, else their diagonals.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        context: int = 512,
        full: bool = False,
        executor: str = "auto",
        threads: int | None = None,
    ) -> None:
        self.context = context
        plan = record_plan(
            config, weights, min(context, _MAX_ROWS), activations=BufferKind.F32, keep=True
        )
        self._is_full = full
        self._inputs = observed_inputs(plan)
        self._stacks = observed_stacks(plan)
        self._widths = {buffer: plan.buffers[buffer].width for buffer in self._inputs}
        self._head = plan.hidden
        n_blocks = -(-context // _BLOCK_TOKENS)
        found, _ = create_executor(
            executor,
            plan,
            weights,
            block_tokens=_BLOCK_TOKENS,
            n_blocks=n_blocks,
            n_threads=threads,
            kv_type=KvType.F32,
        )
        if not hasattr(found, "read_rows"):
            raise ModelError(f"the {found.name} executor cannot show its rows; use native")
        self._executor: Observable = found  # type: ignore[assignment]
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1)

    @property
    def moment_bytes(self) -> int:
        """What the sums of one call of `empty` take."""
        return sum(8 * n * (n + 1 if self._is_full else 1) for n in self._widths.values())

    def empty(self) -> list[InputMoments]:
        """Sums of no rows, to be filled by `add`."""
        return [
            InputMoments.empty(names, self._widths[buffer], self._is_full)
            for buffer, names in self._inputs.items()
        ]

    def empty_stacks(self) -> list[StackSquares]:
        """As `empty`, of the inputs of stacks of matrices: experts, heads."""
        return [stack.empty() for stack in self._stacks]

    def add(
        self,
        tokens: Sequence[int],
        moments: list[InputMoments],
        stacks: Sequence[StackSquares] = (),
    ) -> None:
        """Runs one chunk of at most `context` tokens and adds what its products read; what stacks
        read where they are given."""
        if len(tokens) > self.context:
            raise ModelError(f"a chunk of {len(tokens)} tokens, the context is {self.context}")
        for start in range(0, len(tokens), self._executor.max_rows):
            part = tokens[start : start + self._executor.max_rows]
            self._executor.run(_step(part, start, self._executor.n_blocks))
            read = [partial(self._rows, buffer, len(part)) for buffer in self._inputs]
            list(self._pool.map(lambda rows, sums: sums.add(rows()), read, moments))
            for stack, squares in zip(self._stacks, stacks, strict=False):
                stack.add(self._executor.read_rows, len(part), squares)

    def _rows(self, buffer: int, n: int) -> np.ndarray:
        executor = self._executor
        return executor.hidden if buffer == self._head else executor.read_rows(buffer, n)

    def close(self) -> None:
        self._pool.shutdown()
        self._executor.close()


def observed_inputs(plan: Plan) -> dict[int, tuple[str, ...]]:
    """Buffer -> names of the weights whose product reads it, in the order of the plan.

    Hidden states stand for the input of the head: the same rows, but without the cost of logits.
    """
    found: dict[int, tuple[str, ...]] = {}
    for op in plan.ops:
        if op.kind not in _WEIGHTS_OF:
            continue
        buffer = op.inputs[0]
        if plan.buffers[buffer].kind is not BufferKind.F32:
            raise ModelError("calibration reads float activations; record the plan with f32")
        is_head = plan.buffers[buffer].rows is RowKind.OUT
        key = plan.hidden if is_head else buffer
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), *_names(plan, op))))
    return found


def _names(plan: Plan, op: Op) -> Iterable[str]:
    """Of tensors as files have them, though the weight may be some of their rows."""
    for field in _WEIGHTS_OF[op.kind]:
        at = op.weight_of(field)
        if at >= 0:
            yield stored_name(plan.tensors[at].name)


def _step(tokens: Sequence[int], start: int, n_blocks: int) -> Step:
    """Rows of one sequence that owns the whole pool; all hidden states, no logits."""
    n = len(tokens)
    return Step(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(start, start + n, dtype=np.int32),
        seq_start=np.array([0, n], np.int32),
        block_table=np.arange(n_blocks, dtype=np.int32)[None, :],
        out_rows=np.empty(0, np.int32),
        hidden_rows=np.arange(n, dtype=np.int32),
    )
