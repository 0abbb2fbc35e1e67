"""Asks an app without a socket: for callers in the same process, and in the same event loop.

Owns: the ASGI messages of one request and its answer, whole or as it comes. Must not know: what is
asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

HOST = "127.0.0.1"
HEADERS = ((b"host", HOST.encode()), (b"content-type", b"application/json"))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Relayed:
    """A request that came in elsewhere."""

    method: str
    path: str
    query: bytes = b""
    headers: Iterable[tuple[bytes, bytes]] = field(default=HEADERS)
    body: bytes = b""

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": (HOST, 0),
            "server": (HOST, 0),
        }


async def ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """POSTs a body of JSON. Nobody leaves before the answer is whole."""
    answer = relay(app, Relayed("POST", path, body=body))
    status, headers = await anext(answer)
    named = {name.decode(): value.decode() for name, value in headers}
    return Answer(status, named, b"".join([piece async for piece in answer]))


async def relay(app: ASGIApp, request: Relayed) -> AsyncGenerator[Any, None]:
    """First (status, headers as pairs of bytes), then pieces of the body as they come; what came
    together goes together. Who stops asking has left: the app is told, and waited for."""
    has_left = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        start = await messages.get()
        if start is not None:
            yield start["status"], [tuple(pair) for pair in start["headers"]]
        is_over = start is None
        while not is_over:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            is_over = found[-1] is None
            if piece := b"".join(each.get("body", b"") for each in found if each is not None):
                yield piece
        await running  # with what it failed of
    finally:
        has_left.set()
        if not running.done():
            with contextlib.suppress(Exception):
                await running
