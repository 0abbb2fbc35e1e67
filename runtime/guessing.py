"""Guesses within the engine's loop: one may cost a guess, and never an answer.

Owns: whether guesses are made, which ends for good when making them fails. Must not know: how
tokens are guessed (speculation.py), how they are drawn, whom they are told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .drafts import NO_DRAFT, Draft
from .pooling import Hidden
from .request import Request, Scheduled
from .scheduler import Scheduler
from .speculation import Speculation

log = logging.getLogger(__name__)


class Guessing:
    """Over a Speculation, or over none, which guesses nothing."""

    def __init__(self, speculation: Speculation | None, scheduler: Scheduler) -> None:
        self._speculation, self._scheduler = speculation, scheduler

    def terms(self, n_prompt: int) -> tuple[str, int | None]:
        """(rule, seen_from) of a new request, from any thread: how its guesses are checked unless
        it says so, and from which token on the guesser wants to see it."""
        speculation = self._speculation  # the engine's thread may switch it off meanwhile
        return (
            (speculation.rule, speculation.seen_from(n_prompt)) if speculation else ("match", None)
        )

    def lengthen(self, granted: list[Scheduled]) -> tuple[list[Scheduled], list[Draft]]:
        """The same items, some with rows for guessed tokens."""
        if not self._speculation:
            return granted, [NO_DRAFT] * len(granted)
        try:
            drafts = self._speculation.drafts(granted, self._scheduler.step_rows)
        except Exception:
            self._give_up()
            return granted, [NO_DRAFT] * len(granted)
        longer = [
            self._scheduler.lengthen(item, draft.tokens)
            for item, draft in zip(granted, drafts, strict=True)
        ]
        kept = [draft.first(item.n_draft) for item, draft in zip(longer, drafts, strict=True)]
        return longer, kept

    def see(self, granted: Sequence[Scheduled], hidden: Hidden) -> None:
        """What a step has computed, before it is committed."""
        if not self._speculation:
            return
        try:
            self._speculation.see(granted, hidden)
        except Exception:
            self._give_up()

    def observe(self, n_rows: int, n_streams: int, seconds: float) -> None:
        """What a step of streams alone has cost."""
        if self._speculation:
            self._speculation.observe(n_rows, n_streams, seconds)

    def learn(self, request: Request, draft: Draft, n_right: int) -> None:
        if self._speculation:
            self._speculation.learn(request, draft, n_right)

    def forget(self, request: Request) -> None:
        if self._speculation:
            self._speculation.forget(request)

    def stats(self) -> dict[str, Any]:
        """For EngineStats."""
        return self._speculation.stats() if self._speculation else {}

    def _give_up(self) -> None:
        log.exception("guessing has failed and is switched off")
        self._speculation = None
