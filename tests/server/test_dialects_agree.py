"""The same conversation in every dialect is the same work: equal text and counts, streamed or not,
alone or all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from .test_prefix_fields import serving_prefixes

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hi"}]
N_TOKENS = 24


class Result(NamedTuple):
    text: str
    n_prompt: int
    n_output: int


class Dialect(NamedTuple):
    path: str
    body: Json
    whole: Callable[[Json], Result]
    piece: Callable[[Json], str]
    """The text that an object of a stream brings."""
    last: Callable[[list[Json]], Json]
    """The whole answer that a stream's objects tell, but for its text."""


def chat(body: Json) -> Result:
    usage = body["usage"]
    text = body["choices"][0]["message"]["content"] if body["choices"] else ""
    return Result(text, usage["prompt_tokens"], usage["completion_tokens"])


def response(body: Json) -> Result:
    usage = body["usage"]
    text = body["output"][0]["content"][0]["text"]
    return Result(text, usage["input_tokens"], usage["output_tokens"])


def message(body: Json) -> Result:
    usage = body["usage"]
    n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    text = "".join(block["text"] for block in body["content"])
    return Result(text, n_prompt, usage["output_tokens"])


def ollama(body: Json) -> Result:
    text = body["message"]["content"]
    return Result(text, body["prompt_eval_count"], body["eval_count"])


LIMIT = {"max_tokens": N_TOKENS, "seed": 5}
DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"messages": MESSAGES, **LIMIT, "stream_options": {"include_usage": True}},
        chat,
        lambda chunk: "".join(c["delta"].get("content", "") for c in chunk["choices"]),
        lambda chunks: chunks[-1],
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": MESSAGES, "max_output_tokens": N_TOKENS, "seed": 5},
        response,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda events: events[-1]["response"],
    ),
    "messages": Dialect(
        "/v1/messages",
        {"messages": MESSAGES, **LIMIT},
        message,
        lambda event: event["delta"].get("text", "") if "delta" in event else "",
        lambda events: {**events[-2], "content": []},
    ),
    "ollama": Dialect(
        "/api/chat",
        {
            "messages": MESSAGES,
            "options": {
                **{"num_predict": N_TOKENS, "seed": 5},
                **{"temperature": 1, "top_k": 0, "top_p": 1},
            },
        },
        ollama,
        lambda line: line["message"]["content"],
        lambda lines: lines[-1],
    ),
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving_prefixes() as client:
        yield client


def ask(http: httpx.Client, name: str, stream: bool) -> Result:
    dialect = DIALECTS[name]
    answer = http.post(dialect.path, json={**dialect.body, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert "x-martlet-ignored" not in answer.headers
    if not stream:
        return dialect.whole(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    end = dialect.whole(dialect.last(objects))
    return end._replace(text="".join(map(dialect.piece, objects)))


@pytest.fixture(scope="module")
def expected(http: httpx.Client) -> Result:
    result = ask(http, "chat", False)
    assert (result.n_output, len(result.text)) == (N_TOKENS, pytest.approx(N_TOKENS, abs=20))
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_alone(http: httpx.Client, expected: Result, name: str, stream: bool) -> None:
    assert ask(http, name, stream) == expected


def test_all_at_once(http: httpx.Client, expected: Result) -> None:
    asked = [(name, stream) for name in DIALECTS for stream in (False, True)] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        results = list(pool.map(lambda one: ask(http, *one), asked))
    assert results == [expected] * len(asked)
