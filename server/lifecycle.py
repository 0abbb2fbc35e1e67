"""How many requests are inside, and whether new ones may still come in.

Owns: Lifecycle (the count, draining), Gate (the middleware that keeps it). Must not know: what
requests are for, signals, the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

RETRY_AFTER_S = "5"


class Lifecycle:
    """Of one server; used from its event loop alone."""

    def __init__(self) -> None:
        self.is_draining = False
        self._by_client: Counter[object] = Counter()
        self._changed = asyncio.Event()

    @property
    def n_inside(self) -> int:
        return self._by_client.total()

    def drain(self) -> None:
        """From now on nobody new comes in."""
        self.is_draining = True

    def hurry(self) -> None:
        """Whoever waits for the last one waits no longer."""
        self._changed.set()

    async def empty(self, limit_s: float) -> bool:
        """Until nobody is inside, the time is up, or somebody is in a hurry."""
        if self.n_inside:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), limit_s)
        return not self.n_inside

    @contextlib.contextmanager
    def inside(self, client: object, most: int) -> Iterator[None]:
        """most: requests of one client at a time; 0 for any number. Raises ApiError."""
        if self.is_draining:
            raise closed_door()
        if most and self._by_client[client] >= most:
            raise ApiError(
                429,
                f"{most} requests of yours are unfinished, the most this server takes at a time",
                "rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": RETRY_AFTER_S},
            )
        self._by_client[client] += 1
        try:
            yield
        finally:
            self._by_client[client] -= 1
            self._by_client += Counter()  # drops those at zero
            if not self._by_client:
                self._changed.set()


def closed_door() -> ApiError:
    return ApiError(
        503,
        "the server is stopping; ask again when it is back",
        "unavailable_error",
        code="draining",
        headers={"Retry-After": RETRY_AFTER_S, "Connection": "close"},
    )


class Gate:
    """ASGI middleware behind the guard: counts what asks for work, which is every POST."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, max_per_client: int = 0) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._most = max_per_client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            with self._lifecycle.inside(_client(scope), self._most):
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)


def _client(scope: Scope) -> object:
    """Who is counted as one: a key, or else an address."""
    address = scope.get("client") or ("",)
    return scope.get("state", {}).get("tenant") or address[0]
