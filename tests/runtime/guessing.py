"""Speculation with guesses of one length, whether they pay or not; and guesses of known chances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from martlet.runtime.drafts import Draft
from martlet.runtime.rejection import Distribution
from martlet.runtime.request import Request
from martlet.runtime.sampling import Use, keyed_uniform
from martlet.runtime.speculation import Speculation
from martlet.scripts.scripted_drafter import ScriptedDrafter


def always(length: int, outputs: Mapping[str, Sequence[int]], accuracy: float) -> Speculation:
    """outputs: of each request, by id, without guesses. accuracy: how often a guess is right."""
    return Speculation(ScriptedDrafter(outputs, accuracy), length=length)


class ChanceDrafter:
    """Draws every guess from the same chances, as a small model draws from its own."""

    name = "chance"
    priors: tuple[float, ...] = (0.8,)
    reach = 0

    def __init__(self, chances: Distribution) -> None:
        self.chances = chances

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        return [self._propose(request, most) for request in requests]

    def token_seconds(self, n_requests: int) -> float:
        return 0.0

    def forget(self, request: Request) -> None: ...

    def _propose(self, request: Request, most: int) -> Draft:
        places = range(request.n_output, request.n_output + most)
        numbers = [keyed_uniform(request.seed, at, Use.GUESS) for at in places]
        tokens = [self.chances.draw(number) for number in numbers]
        return Draft(tokens, 0, [self.chances] * most)
