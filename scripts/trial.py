"""What the change of one weight does to a model's predictions, measured on a few texts.
Owns the base's hidden states and the judgement (KL divergence over the tokens that matter); must
not know formats or why a weight is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from martlet.runtime.dense import DenseRunner
from martlet.scripts.logit_stats import log_softmax

if TYPE_CHECKING:
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.executors.reference import Run
    from martlet.runtime.weights import WeightSource

WHOLE_VOCABULARY = 16384  # a larger one is judged by its likeliest tokens alone
LIKELIEST = 64  # of every row
_ROWS = 64  # whose logits are computed at once


class Trial:
    """KL divergence in nats per row from the model as it is, with one weight replaced.

    Of a large vocabulary only the tokens that are among the likeliest of some row take part, as if
    there were no others: what is compared are differences between weights, not models.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._dense = DenseRunner(config, weights, sequences)
        names = [tensor.name for tensor in self._dense.plan.tensors]
        self._head = "output.weight" if "output.weight" in names else "token_embd.weight"
        run = self._dense.begin()
        self._dense.advance(run, 0)
        head = self._dense.value(self._head)
        self._tokens = _tokens_that_matter(run.hidden(), head)
        self._base = log_softmax(run.hidden() @ head[self._tokens].T)

    def divergences(
        self, names: Collection[str], change: Callable[[str, np.ndarray], np.ndarray]
    ) -> Iterator[tuple[str, float]]:
        """(name, divergence) with each of these weights alone replaced by change(name, values),
        float32 of their shape, in the order in which the model reads them."""
        dense, run = self._dense, self._dense.begin()
        done: set[str] = set()
        for at in range(len(dense.plan.ops)):
            for name in self._weights_at(at):
                if name in names and name not in done:
                    done.add(name)
                    yield name, self._with(name, change(name, dense.value(name)), run, at)
            dense.advance(run, at, at + 1)

    def _weights_at(self, at: int) -> list[str]:
        plan = self._dense.plan
        return [plan.tensors[w].name for w in plan.ops[at].weights if w >= 0]

    def _with(self, name: str, values: np.ndarray, run: Run, at: int) -> float:
        dense = self._dense
        branch, before = dense.branch(run, at), dense.value(name)
        dense.replace(name, values)
        try:
            dense.advance(branch, at)
            logits = branch.hidden() @ dense.value(self._head)[self._tokens].T
        finally:
            dense.replace(name, before)
        other = log_softmax(logits)
        return float((np.exp(self._base) * (self._base - other)).sum(axis=1).mean())


def _tokens_that_matter(hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Ascending ids."""
    if len(head) <= WHOLE_VOCABULARY:
        return np.arange(len(head))
    found = [
        np.argpartition(hidden[start : start + _ROWS] @ head.T, -LIKELIEST, axis=1)[:, -LIKELIEST:]
        for start in range(0, len(hidden), _ROWS)
    ]
    return np.unique(np.concatenate(found))
