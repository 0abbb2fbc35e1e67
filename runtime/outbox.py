"""Events on their way to the owners of requests, in order.

Owns: when they are handed over, and that an owner's mistake ends no other request. Must not know:
what events say, why requests end.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator

from .events import Event
from .request import Request, State

log = logging.getLogger(__name__)


class Outbox:
    def __init__(self, on_failure: Callable[[Request, Exception], None]) -> None:
        """on_failure: what becomes of a request whose owner fails to take an event."""
        self._on_failure = on_failure
        self._events: deque[tuple[Request, Event]] = deque()
        self._is_held = False

    def tell(self, request: Request, event: Event) -> None:
        self._events.append((request, event))
        if not self._is_held:
            self._deliver()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While tokens are drawn, events wait for the last of them: an owner's thread that wakes up
        earlier takes the interpreter from the draws, and the machine from the next step."""
        self._is_held = True
        try:
            yield
        finally:
            self._deliver()

    def _deliver(self) -> None:
        self._is_held = True  # an owner may cause more events, which come after these
        try:
            while self._events:
                self._hand_over(*self._events.popleft())
        finally:  # whatever ends the engine's thread, the last events still go out
            self._is_held = False

    def _hand_over(self, request: Request, event: Event) -> None:
        try:
            request.on_event(event)
        except Exception as error:
            if request.state is State.FINISHED:
                log.error("on_event of request %s failed", request.id, exc_info=error)
            else:
                self._on_failure(request, error)
