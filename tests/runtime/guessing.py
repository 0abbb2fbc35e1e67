"""Speculation with guesses of one length, whether they pay or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from martlet.runtime.speculation import Speculation
from martlet.scripts.scripted_drafter import ScriptedDrafter


def always(length: int, outputs: Mapping[str, Sequence[int]], accuracy: float) -> Speculation:
    """outputs: of each request, by id, without guesses. accuracy: how often a guess is right."""
    return Speculation(ScriptedDrafter(outputs, accuracy), length=length)
