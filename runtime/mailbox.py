"""Where other threads leave requests and cancellations for the engine thread.

Owns: what is unfinished, the limit on it, and the engine thread's sleep. All its state is guarded
by one condition. Must not know: scheduling, events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import ModelError, QueueFull, RequestError
from .request import Request


class Mailbox:
    def __init__(self, max_unfinished: int) -> None:
        self._max_unfinished = max_unfinished
        self._changed = threading.Condition()
        self._unfinished: dict[str, Request] = {}
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._n_posted = 0
        self._is_closed = False

    @property
    def n_unfinished(self) -> int:
        return len(self._unfinished)

    def post(self, request_id: str, make: Callable[[int], Request]) -> Request:
        """Accepts make(arrival number), or raises at once."""
        with self._changed:
            if self._is_closed:
                raise ModelError("the engine is closed")
            if request_id in self._unfinished:
                raise RequestError(f"request {request_id!r} is unfinished", field="request_id")
            if len(self._unfinished) >= self._max_unfinished:
                raise QueueFull(
                    f"{len(self._unfinished)} requests are unfinished, the most accepted; "
                    "try again later",
                    unfinished=len(self._unfinished),
                    limit=self._max_unfinished,
                )
            request = make(self._n_posted)
            self._n_posted += 1
            self._unfinished[request_id] = request
            self._arrived.append(request)
            self._changed.notify()
        return request

    def cancel(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._unfinished:
                self._cancelled.append(self._unfinished[request_id])
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ---- for the engine thread -------------------------------------------------------------------

    def wait_for_work(self) -> bool:
        """Sleeps until a request is unfinished; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._unfinished)
            return not self._is_closed

    def take(self) -> tuple[list[Request], list[Request]]:
        """New requests in order of arrival, and cancelled ones (which may be finished by now)."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        return arrived, cancelled

    def forget(self, request: Request) -> None:
        """The request is finished: its place and its id are free again."""
        with self._changed:
            del self._unfinished[request.id]
