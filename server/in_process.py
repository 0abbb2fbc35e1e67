"""Asks an app without a socket: for callers in the same process, and in the same event loop.

Owns: the ASGI messages of one whole request and its answer. Must not know: what is asked.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

HOST = "127.0.0.1"
HEADERS = ((b"host", HOST.encode()), (b"content-type", b"application/json"))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """POSTs a body of JSON. Nobody leaves before the answer is whole."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": HEADERS,
        "client": (HOST, 0),
        "server": (HOST, 0),
    }
    unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    messages: list[Message] = []

    async def receive() -> Message:
        if not unsent:
            await asyncio.Event().wait()
        return unsent.pop()

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    start, *pieces = messages
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(piece.get("body", b"") for piece in pieces))
