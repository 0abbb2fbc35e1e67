"""A prompt as one vector, made of the hidden states of its tokens.

Owns: the kinds of pooling, as model files number them, and the sum. Must not know: requests, steps,
what becomes of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import RequestError

Pooling: TypeAlias = Literal["mean", "cls", "last"]
Hidden = npt.NDArray[np.float32]
NO_HIDDEN: Hidden = np.empty((0, 0), np.float32)

# `{arch}.pooling_type` of a file; without it, or with 0 for none, the last token stands for all,
# as only it has seen the others.
POOLINGS: dict[int, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last"}
DEFAULT, MEAN, RANK = 0, 1, 4


def pooling_of(kind: int) -> Pooling:
    if kind not in POOLINGS:
        what = "ranks texts and gives" if kind == RANK else "gives"
        raise RequestError(
            f"the model's file has pooling type {kind}, which {what} no embedding; known are "
            f"{', '.join(f'{n} ({name})' for n, name in POOLINGS.items())}",
            field="model",
        )
    return POOLINGS[kind]


def ranking_of(kind: int, sees_ahead: bool) -> Pooling:
    """Which token a classifier is shown: the first, or the last where only that has seen all."""
    if kind != RANK:
        raise RequestError(
            f"the model's file has pooling type {kind}, only models of type {RANK} rank texts",
            field="model",
        )
    return "cls" if sees_ahead else "last"


@dataclass
class Pooled:
    """Of one prompt. Rows are added one by one, in order: chunks leave no trace."""

    pooling: Pooling
    n_tokens: int
    _sum: npt.NDArray[np.float64] | None = field(default=None, repr=False)

    @property
    def reads_cache(self) -> bool:
        """Whether rows before the last need not be computed for it."""
        return self.pooling == "last"

    def n_rows(self, first: int, end: int) -> int:
        """How many rows at the end of the tokens first … end - 1 it needs, computed for the first
        time."""
        if self.pooling == "mean":
            return end - first
        if self.pooling == "cls":
            return end if first == 0 else 0
        return int(end == self.n_tokens)

    def read(self, rows: Hidden) -> None:
        for row in rows[:1] if self.pooling == "cls" else rows:
            self._sum = row.astype(np.float64) if self._sum is None else self._sum + row

    def vector(self) -> Hidden:
        assert self._sum is not None, "no row was read"
        n_summed = self.n_tokens if self.pooling == "mean" else 1
        return (self._sum / n_summed).astype(np.float32)
