"""Text on its way to the client: characters cut by the end, stops held back, separators."""

from __future__ import annotations

from typing import Any

import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import chat_body, events, joined, serving


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
