"""Text on its way to the client: characters cut by the end, stops held back, separators."""

from __future__ import annotations

from typing import Any

import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import assert_works, chat_body, events, joined, serving, wait_until


@pytest.mark.parametrize(
    ("raw", "fields", "reason"),
    [
        (b"ok\xf0\x9f", {"max_tokens": 4}, "length"),
        (b"ok\xf0\x9f", {}, "stop"),
        (b"ok\xf0\x9fEND", {"stop": "END"}, "stop"),
    ],
)
def test_b46_unfinished_character(raw: bytes, fields: dict[str, Any], reason: str) -> None:
    with serving(ScriptedEngine(says(raw))) as client:
        chunks = events(client, "/v1/chat/completions", chat_body(**fields))
        assert joined(chunks) == "ok\ufffd"
        assert chunks[-2]["choices"][0]["finish_reason"] == reason
        assert chunks[-1] == "[DONE]"
        answer = client.post("/v1/chat/completions", json=chat_body(**fields)).json()
        assert answer["choices"][0]["message"]["content"] == "ok\ufffd"
        n_shown = len(raw) + (0 if fields else 1)
        assert answer["usage"]["completion_tokens"] == n_shown


def test_b46_leaving_within_a_character_is_leaving() -> None:
    engine = ScriptedEngine(says(b"ok\xf0\x9f"), token_s=0.2)
    with serving(engine) as client:
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)):
            wait_until(lambda: bool(engine.requests) and engine.requests[0].n_emitted >= 3)
        wait_until(lambda: engine.requests[0].reason is not None)
        assert engine.requests[0].reason == "cancelled"
        assert_works(client)
        options = {"include_usage": True}
        chunks = events(client, "/v1/chat/completions", chat_body(stream_options=options))
        assert chunks[-2]["usage"]["completion_tokens"] == 5, "its bytes, and the end"


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 8}])
def test_b50_held_back_text_arrives(fields: dict[str, Any]) -> None:
    with serving(ScriptedEngine(says("pleas EN"))) as client:
        body = chat_body(stop="END!", **fields)
        assert joined(events(client, "/v1/chat/completions", body)) == "pleas EN"
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "pleas EN"


def test_line_separators_are_escaped_on_the_wire() -> None:
    text = "a\u2028b\u0085c\nd\r\ne"
    with serving(ScriptedEngine(says(text))) as client:
        raw = client.post("/v1/chat/completions", json=chat_body(stream=True)).content
        assert raw.isascii()
        assert b"\r" not in raw
        assert joined(events(client, "/v1/chat/completions", chat_body())) == text
