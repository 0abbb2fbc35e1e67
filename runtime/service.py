"""Two classes of service, and the order in which requests go: each request's place in line.

Owns: the classes, their shares, places. Must not know: rows, blocks, steps.

First come, first served inside a class. Between them, places are handed out as in weighted fair
queueing: one of a background request lies EVERY places further on, one of an interactive request
lies one. So the n-th background request in line is passed by at most n * EVERY interactive ones
that came later, however many keep coming, and an interactive one by one background request at most
for each EVERY interactive ones before it. A place never changes, and places are totally ordered;
that is what the scheduler's promise that every request finishes rests on.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Service: TypeAlias = Literal["interactive", "background"]
SERVICES: tuple[Service, ...] = ("interactive", "background")  # better ones first
EVERY = 8
_STRIDES: dict[Service, int] = {"interactive": 1, "background": EVERY}


class Place(NamedTuple):
    """Smaller goes first."""

    tag: int
    rank: int
    arrival: int


class Line:
    def __init__(self) -> None:
        self._now = 0  # the furthest place that was admitted
        self._last = dict.fromkeys(SERVICES, 0)

    def place(self, service: Service, arrival: int) -> Place:
        """For the next request of the class to arrive."""
        self._last[service] = max(self._now, self._last[service]) + _STRIDES[service]
        return Place(self._last[service], SERVICES.index(service), arrival)

    def admit(self, place: Place) -> None:
        self._now = max(self._now, place.tag)


def favoured(n_steps: int) -> Service:
    """The class whose prompts get a step's rows first: background ones in one step of EVERY."""
    return "background" if n_steps % EVERY == EVERY - 1 else "interactive"
