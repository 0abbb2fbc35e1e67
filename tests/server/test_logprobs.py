"""Logprobs in the two shapes OpenAI has for them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import assert_refused, assert_works, chat_body, events, serving

USER: Any = [{"role": "user", "content": "hi"}]


def test_b72_chat_logprobs(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [t.token for t in logprobs.content] == [*"hello", "<|im_end|>"]
    first = logprobs.content[0]
    assert (first.logprob, first.bytes) == (-1.386, [ord("h")])
    assert [(t.token, t.bytes) for t in first.top_logprobs][:2] == [("A", [65]), ("h", [104])]
    assert len(first.top_logprobs) == 3


def test_b72_streamed_chat_logprobs_cover_every_token(official: openai.OpenAI) -> None:
    stream = official.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, stream=True
    )
    tokens = []
    for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        tokens += [t.token for t in (logprobs.content or [] if logprobs else [])]
    assert tokens == [*"hello", "<|im_end|>"]


def test_b72_completion_logprobs(official: openai.OpenAI) -> None:
    answer = official.completions.create(model="tiny", prompt="a", logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*"hello", "<|im_end|>"]
    assert logprobs.token_logprobs == [-1.386] * 6
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.top_logprobs is not None
    # the drawn token is always among the alternatives
    assert all(t in top for t, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    zero = official.completions.create(model="tiny", prompt="a", logprobs=0).choices[0].logprobs
    assert zero is not None
    assert zero.top_logprobs is not None
    assert zero.top_logprobs[0] == {"h": -1.386}


def test_b72_partial_characters_have_bytes_and_offsets() -> None:
    with serving(ScriptedEngine(says("é!"))) as client:
        body = {"prompt": "a", "logprobs": 1}
        answer = client.post("/v1/completions", json=body).json()["choices"][0]
        assert answer["text"] == "é!"
        assert answer["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert answer["logprobs"]["text_offset"][:3] == [0, 0, 1]
        chunks = events(client, "/v1/completions", body)[:-1]
        entries = [e["logprobs"] for c in chunks for e in c["choices"] if e["logprobs"]]
        assert [t for e in entries for t in e["tokens"]] == answer["logprobs"]["tokens"]
        assert [o for e in entries for o in e["text_offset"]] == answer["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"top_logprobs": 2}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}),
        ("chat/completions", {"logprobs": 3}),
        ("completions", {"logprobs": 21}),
        ("completions", {"logprobs": -1}),
        ("completions", {"logprobs": True}),
        ("completions", {"logprobs": 21, "echo": True}),
        ("completions", {"prompt_logprobs": 21}),
        ("completions", {"prompt_logprobs": 1, "stream": True}),
        ("completions", {"max_tokens": 0}),
        ("chat/completions", {"prompt_logprobs": -1}),
        ("completions", {"top_logprobs": 1}),
    ],
)
def test_b72_inconsistent_logprobs(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    body = chat_body() if path.startswith("chat") else {"prompt": "a"}
    error = assert_refused(client.post(f"/v1/{path}", json={**body, **fields}))
    assert error["param"] in fields
    assert_works(client)
