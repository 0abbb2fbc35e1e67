"""A real server in front of an engine, its clients, and what tests say to and of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from martlet.runtime.engine import Engine
from martlet.runtime.tokenizer import Tokenizer
from martlet.server import ServerOptions, create_app
from martlet.server.run import open_socket, uvicorn_config

from .scripted_engine import ScriptedEngine


@contextlib.contextmanager
def running_app(app: Any, options: ServerOptions | None = None) -> Iterator[str]:
    """A real uvicorn on a free loopback port, in a thread; gives its address."""
    listener = open_socket("127.0.0.1", 0)
    config = uvicorn_config(app, options or ServerOptions())
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextlib.contextmanager
def client_of(
    app: Any, options: ServerOptions | None = None, *, timeout_s: float = 30
) -> Iterator[httpx.Client]:
    """A client of a real server that runs this app."""
    with (
        running_app(app, options) as url,
        httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client,
    ):
        yield client


@contextlib.contextmanager
def serving_engine(
    engine: Engine, tokenizer: Tokenizer, *, timeout_s: float = 30, **options: Any
) -> Iterator[httpx.Client]:
    """A client of a server over a real engine, which is started and closed."""
    engine.start()
    try:
        terms = ServerOptions(**options)
        app = create_app(
            engine, tokenizer, model_name="tiny", context=engine.context, options=terms
        )
        with client_of(app, terms, timeout_s=timeout_s) as client:
            yield client
    finally:
        engine.close()


@contextlib.contextmanager
def serving(
    engine: ScriptedEngine, *, model_name: str = "tiny", **options: Any
) -> Iterator[httpx.Client]:
    """A client of a server over this engine."""
    terms = ServerOptions(**options)
    app = create_app(
        engine,
        engine.tokenizer,
        model_name=model_name,
        context=engine.context,
        max_unfinished=engine.max_unfinished,
        options=terms,
    )
    with client_of(app, terms) as client:
        yield client


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def assert_works(client: httpx.Client, **extra: Any) -> None:
    """One normal request, to follow every bad one."""
    answer = client.post("/v1/chat/completions", json=chat_body(max_tokens=3), **extra)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def assert_refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """OpenAI's error object with this status; gives its inside."""
    assert answer.status_code == status, answer.text
    assert len(answer.content) <= 4096
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, read by the strictest rules: one data line, one blank line."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("\n\n")
    found = []
    for event in answer.text[:-2].split("\n\n"):
        assert event.startswith("data: ")
        assert "\n" not in event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def joined(chunks: list[Any]) -> str:
    """All text of a stream's only choice."""
    text = ""
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            text += choice.get("text", "") + (choice.get("delta", {}).get("content") or "")
    return text


def prompt_of(engine: ScriptedEngine) -> str:
    """The latest prompt, control tokens included."""
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
