"""How long models stay: durations as Ollama's clients write them, and what they do to a shelf."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

import httpx
import ollama
import pytest
from martlet.server.keep_alive import seconds_of

from .serving import wait_until
from .test_shelf import Models, ask, serving, text

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (2.5, 2.5),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("300", 300.0),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("+10s", 10.0),
        (10**400, 1e15),
        (-(10**400), math.inf),
        (1e308, 1e15),
    ],
)
def test_durations(value: Any, seconds: float) -> None:
    assert seconds_of(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "m", "5x", "5 m", "1h30", "--1", True, [], {}, math.nan, "\u0663s"]
)
def test_what_is_no_duration(value: Any) -> None:
    with pytest.raises(ValueError, match="must be seconds"):
        seconds_of(value)


def client_of(http: httpx.Client) -> ollama.Client:
    return ollama.Client(host=str(http.base_url), trust_env=False)


def left_s(client: ollama.Client) -> dict[str, float]:
    """How long each loaded model stays."""
    now = datetime.now(timezone.utc)
    models = client.ps().models
    return {m.model or "": (m.expires_at - now).total_seconds() for m in models if m.expires_at}


def test_requests_say_how_long_their_model_stays() -> None:
    models = Models()
    with serving(models) as http:
        client = client_of(http)
        client.generate("a", "hi", keep_alive="10m")
        client.chat("b", HI, keep_alive=-1)
        client.embed("c", "hi", keep_alive=120.0)
        left = left_s(client)
        assert 500 < left["a"] < 660
        assert left["b"] > 3e8
        assert 60 < left["c"] < 180
        text(ask(http, "a"))  # who says nothing changes nothing, and begins the time anew
        assert 500 < left_s(client)["a"] < 660
        client.generate("a", "hi", keep_alive=0.2)
        wait_until(lambda: models.open == {"b", "c"})


def test_zero_unloads_behind_the_answer() -> None:
    models = Models(token_s=0.05)
    with serving(models, keep_alive_s=600) as http:
        client = client_of(http)
        answer = client.chat("a", HI, keep_alive=0)
        assert (answer.message.content, answer.done_reason) == ("I am a", "stop")
        wait_until(lambda: not models.open)
        text(ask(http, "a"))
        assert 500 < left_s(client)["a"] < 660  # loaded anew, the server's own time counts


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_an_empty_request_with_zero_unloads_and_loads_nothing(path: str) -> None:
    models = Models()
    with serving(models) as http:
        for n_before in (0, 1):
            answer = http.post(path, json={"model": "b", "keep_alive": 0}).json()
            assert (answer["model"], answer["done"], answer["done_reason"]) == ("b", True, "unload")
            assert not models.open
            assert models.loads["b"] == n_before
            loaded = http.post(path, json={"model": "b"}).json()
            assert loaded["done_reason"] == "load"
            assert models.open == {"b"}
        assert http.post(path, json={"model": "d", "keep_alive": 0}).status_code == 404
    client = ollama.GenerateResponse(**{"response": "", **answer})
    assert client.done_reason == "unload"


def test_a_busy_model_goes_when_its_answer_is_out() -> None:
    models = Models(token_s=0.05)
    with serving(models) as http:
        client = client_of(http)
        pieces = client.generate("a", "hi", stream=True)
        first = next(iter(pieces))
        client.generate("a", "", keep_alive=0)
        assert models.open == {"a"}
        assert first.response + "".join(piece.response for piece in pieces) == "I am a"
        wait_until(lambda: not models.open)


def test_a_bad_duration_is_refused_by_name() -> None:
    with serving(Models()) as http:
        for path in ("/api/chat", "/api/generate", "/api/embed"):
            body = {"model": "a", "messages": HI, "prompt": "hi", "input": "hi"}
            answer = http.post(path, json={**body, "keep_alive": "soon"})
            assert answer.status_code == 400, path
            assert "keep_alive" in answer.json()["error"] or "belongs to" in answer.json()["error"]
