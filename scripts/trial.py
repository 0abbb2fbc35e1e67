"""What the change of one weight does to a model's predictions, measured on a few texts.
Owns the base's hidden states and the judgement (KL divergence over the tokens that matter); must
not know formats or why a weight is changed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from martlet.runtime.dense import DenseRunner
from martlet.runtime.executors.reference_math import soft_capped
from martlet.scripts.logit_stats import log_softmax

if TYPE_CHECKING:
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.executors.reference_run import Run
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
        self._bias = self._dense.value("output.bias") if "output.bias" in names else None
        self._scale, self._cap = np.float32(config.logit_scale), config.logit_cap
        run = self._dense.begin()
        self._dense.advance(run, 0)
        head = self._dense.value(self._head)
        self._hidden = run.hidden()
        self._tokens = _tokens_that_matter(self._hidden, head)
        self._base = self._predictions(self._hidden, head)

    def divergences(
        self,
        names: Collection[str],
        change: Callable[[str, np.ndarray], np.ndarray],
        threads: int | None = None,
    ) -> Iterator[tuple[str, float]]:
        """(name, divergence) with each of these weights alone replaced by change(name, values),
        float32 of their shape, in the order in which the model reads them.

        As many run at once as there are threads; `change` must bear that.
        """
        n_threads = threads or os.cpu_count() or 1
        dense, run = self._dense, self._dense.begin()
        waiting: deque[tuple[str, Future[float]]] = deque()
        done: set[str] = set()
        with ThreadPoolExecutor(n_threads) as pool:
            for at in range(len(dense.plan.ops)):
                for name in self._weights_at(at):
                    if name in names and name not in done:
                        done.add(name)
                        branch = dense.branch(run, at)
                        waiting.append((name, pool.submit(self._with, name, change, branch, at)))
                while len(waiting) > n_threads:  # each holds the rows of a branch
                    yield _first(waiting)
                dense.advance(run, at, at + 1)
            while waiting:
                yield _first(waiting)

    def divergences_of_tied(
        self, change: Callable[[str, np.ndarray], np.ndarray]
    ) -> tuple[float, float]:
        """Of an embedding that is the head as well: with other rows looked up, and with other
        logits computed, each by itself."""
        before = self._dense.value(self._head)
        values = change(self._head, before)
        dense = self._dense.changed(self._head, values)
        run = dense.begin()
        dense.advance(run, 0)
        pairs = (run.hidden(), before), (self._hidden, values)
        looked_up, computed = (self._divergence(*pair) for pair in pairs)
        return looked_up, computed

    def _weights_at(self, at: int) -> list[str]:
        plan = self._dense.plan
        return [plan.tensors[w].name for w in plan.ops[at].weights if w >= 0]

    def _with(
        self, name: str, change: Callable[[str, np.ndarray], np.ndarray], branch: Run, at: int
    ) -> float:
        dense = self._dense.changed(name, change(name, self._dense.value(name)))
        dense.advance(branch, at)
        return self._divergence(branch.hidden(), dense.value(self._head))

    def _divergence(self, hidden: np.ndarray, head: np.ndarray) -> float:
        rest = self._base - self._predictions(hidden, head)
        return float((np.exp(self._base) * rest).sum(axis=1).mean())

    def _predictions(self, hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
        logits = hidden @ head[self._tokens].T
        if self._bias is not None:
            logits += self._bias[self._tokens]
        return log_softmax(soft_capped(self._scale * logits, self._cap))


def _first(waiting: deque[tuple[str, Future[float]]]) -> tuple[str, float]:
    name, divergence = waiting.popleft()
    return name, divergence.result()


def _tokens_that_matter(hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Ascending ids."""
    if len(head) <= WHOLE_VOCABULARY:
        return np.arange(len(head))
    found = [
        np.argpartition(hidden[start : start + _ROWS] @ head.T, -LIKELIEST, axis=1)[:, -LIKELIEST:]
        for start in range(0, len(hidden), _ROWS)
    ]
    return np.unique(np.concatenate(found))
