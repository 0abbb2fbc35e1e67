"""Clients that leave, and streams that end what they stand for.

Owns: noticing a disconnect while nothing is sent, EventStream. Must not know: dialects, requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .bridge import Job

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


class EventStream(StreamingResponse):
    """A stream that ends its job, however it ends itself."""

    def __init__(
        self, events: AsyncIterator[str], job: Job, media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, headers={**STREAM_HEADERS, **headers}, media_type=media_type)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Leaner than the base class, whose task groups stand between each chunk and the socket.
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self.stream_response(send))
        finally:
            self._job.cancel()


class ClientGone(Exception):
    """The connection closed before there was anything to send."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is given up when the client leaves. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
