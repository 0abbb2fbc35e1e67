"""A drafter that knows what requests will say, and is wrong as often as it is told to be.
For benchmarks and tests; must not know how guesses are checked."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from martlet.runtime.drafts import Draft
from martlet.runtime.pooling import Hidden
from martlet.runtime.request import Request


class ScriptedDrafter:
    name = "scripted"
    priors: tuple[float, ...] = (0.8,)
    reach = 0

    def __init__(self, outputs: Mapping[str, Sequence[int]], acceptance: float) -> None:
        """outputs: of each request, by id, as it is without any guesses. acceptance: the
        probability that a guessed token is the right one."""
        self._outputs, self._acceptance = outputs, acceptance
        self._random = random.Random(0)

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        return [self._propose(request, most) for request in requests]

    def token_seconds(self, n_requests: int) -> float:
        return 0.0

    def see(self, request: Request, first: int, hidden: Hidden) -> None: ...

    def forget(self, request: Request) -> None: ...

    def _propose(self, request: Request, most: int) -> Draft:
        coming = self._outputs.get(request.id, ())[request.n_output :][:most]
        return Draft([self._spoilt(token) for token in coming])

    def _spoilt(self, token: int) -> int:
        return token if self._random.random() < self._acceptance else token - 1 if token else 1
