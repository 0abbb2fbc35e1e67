"""Requests of every dialect through the whole app: never a 500, and a refusal has words.

An input is a line with the path, lines of headers, an empty line, and the body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from martlet.server import create_app

from ..server.scripted_engine import ScriptedEngine

MOST_BYTES = 2048
MOST_S = 5.0
ENGINE = ScriptedEngine()
APP = create_app(ENGINE, ENGINE.tokenizer, model_name="tiny", context=ENGINE.context)
LOOP = asyncio.new_event_loop()
FIXED = [(b"host", b"localhost")]


async def answer(path: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw, _, query = path.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST" if body else "GET",
        "scheme": "http",
        "path": raw.decode("latin-1"),
        "raw_path": raw,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }
    await asyncio.wait_for(APP(scope, receive, send), MOST_S)
    parts = [m.get("body", b"") for m in sent if m["type"] == "http.response.body"]
    return sent[0]["status"], b"".join(parts)


def run(data: bytes) -> None:
    head, _, body = data.partition(b"\n\n")
    path, *lines = head.split(b"\n")
    headers = [*FIXED, (b"content-length", str(len(body)).encode())]
    for line in lines[:20]:
        name, _, value = line.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    if not any(name == b"content-type" for name, _ in headers):
        headers.append((b"content-type", b"application/json"))
    status, text = LOOP.run_until_complete(answer(b"/" + path.lstrip(b"/"), headers, body))
    ENGINE.requests.clear()
    assert 200 <= status < 600, status
    # The scripted engine says "hello", whatever a grammar asks for, and then fails on purpose.
    assert status != 500 or b"scripted fault" in text, text
    if status >= 400 and status != 404:
        assert text, status


def seeds() -> Iterator[bytes]:
    from ..server.test_every_endpoint import BODIES

    more: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "model": "tiny",
            "stream": True,
            "max_tokens": 3,
            "temperature": 0.5,
            "logit_bias": {"97": -100},
            "response_format": {"type": "json_object"},
            "stop": ["x"],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 2,
        },
        "/api/chat": {"stream": False, "format": "json", "options": {"seed": 1, "num_predict": 2}},
        "/v1/completions": {"n": 1, "echo": True, "logprobs": 1, "max_tokens": 2, "suffix": "b"},
        "/v1/messages": {"system": "be brief", "stop_sequences": ["a"], "stream": True},
        "/v1/responses": {"instructions": "x", "text": {"format": {"type": "text"}}},
    }
    for path, body in BODIES.items():
        yield f"{path}\n\n{json.dumps({**body, **more.get(path, {})})}".encode()
    yield b"/metrics\nAccept: text/plain\n\n"
    yield b"/v1/models\nOrigin: http://evil.example\nX-Request-Id: a.b-c\n\n"
    yield b"/v1/models/tiny\n\n"
    yield b"/health\nHost: localhost:80\nAuthorization: Bearer x\n\n"
    yield b"/props?x=1\nTraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n\n"
