"""What a generating request tells whoever writes down where its time went.

Owns: Told. Must not know: who writes (telemetry.py), engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..runtime.events import Event
from ..runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Told:
    path: str
    headers: Mapping[str, str]
    answer_id: str
    asked_model: str
    """As the request names it; the served one's name where it names none."""
    served_model: str
    params: SamplingParams
    n_asks: int
    """Engine requests behind it: prompts x answers."""
    arrived_ns: int
    """Of time.monotonic_ns."""


Observe: TypeAlias = Callable[[int, Event], None]
Spans: TypeAlias = Callable[[Told], Observe]
"""Called for each request; what it gives takes the events of all its engine requests."""


def both(first: Observe, second: Observe) -> Observe:
    def observe(index: int, event: Event) -> None:
        first(index, event)
        second(index, event)

    return observe
