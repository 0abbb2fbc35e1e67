"""An app asked without a socket: pieces as they come, and it is told when the asker has left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from martlet.server.in_process import Relayed, ask, relay
from starlette.types import Receive, Scope, Send

STATUS_AND_HEADERS = (200, [(b"content-type", b"text/plain")])


async def start(send: Send) -> None:
    status, headers = STATUS_AND_HEADERS
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await start(send)
    body = (await receive())["body"]
    query = scope["query_string"]
    parts = scope["method"].encode(), scope["path"].encode(), query, body
    for part in parts:
        await send({"type": "http.response.body", "body": part + b" ", "more_body": True})
    await send({"type": "http.response.body"})


async def everything(request: Relayed, app: Any) -> list[Any]:
    return [piece async for piece in relay(app, request)]


def test_the_request_arrives_whole() -> None:
    head, *pieces = asyncio.run(everything(Relayed("PUT", "/a", b"q=1", body=b"text"), echo))
    assert head == STATUS_AND_HEADERS
    assert b"".join(pieces) == b"PUT /a q=1 text "
    answer = asyncio.run(ask(echo, "/b", b"{}"))
    assert answer == (200, {"content-type": "text/plain"}, b"POST /b  {} ")


def test_pieces_come_before_the_end() -> None:
    async def run() -> list[Any]:
        go_on, seen = asyncio.Event(), []

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await start(send)
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"second"})

        async for piece in relay(slow, Relayed("GET", "/")):
            seen.append(piece)
            if piece == b"first":
                go_on.set()
        return seen

    assert asyncio.run(run()) == [STATUS_AND_HEADERS, b"first", b"second"]


def test_who_leaves_is_told_of_and_the_end_waited_for() -> None:
    async def run() -> list[str]:
        told: list[str] = []

        async def endless(scope: Scope, receive: Receive, send: Send) -> None:
            await start(send)
            await receive()
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            told.append((await receive())["type"])
            await asyncio.sleep(0.01)
            told.append("tidied")

        pieces = relay(endless, Relayed("GET", "/"))
        await anext(pieces)
        assert await anext(pieces) == b"a"
        await pieces.aclose()
        return told

    assert asyncio.run(run()) == ["http.disconnect", "tidied"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_failure_reaches_the_asker(has_begun: bool) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await start(send)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(everything(Relayed("GET", "/"), failing))
