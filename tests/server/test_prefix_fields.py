"""Prefixes over HTTP: whose they are, why one was not used; and the best of several answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine

from ..runtime.scripted import ScriptedExecutor, hashed_logits
from .scripted_engine import byte_tokenizer
from .serving import assert_refused, serving_engine

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = [ord("q")] * 40  # two blocks of 16, and eight tokens


@contextlib.contextmanager
def serving_prefixes(**options: Any) -> Iterator[httpx.Client]:
    tokenizer = byte_tokenizer()
    engine = Engine(ScriptedExecutor(hashed_logits()), tokenizer, context=256)
    with serving_engine(engine, tokenizer, **options) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_prefixes() as client:
        yield client


def post(client: httpx.Client, *, key: str = "", **fields: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": LONG, "max_tokens": 1, **fields}
    answer = client.post(PATH, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    n: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def test_b98_a_salt_shares_with_itself_alone(client: httpx.Client) -> None:
    prompt = [ord("s")] * 40
    salts = ("a", "b", "a", None, "")[:4]
    answers = [post(client, prompt=prompt, cache_salt=salt) for salt in salts]
    assert [cached(answer) for answer in answers] == [0, 0, 32, 0]


def test_keys_do_not_share_and_a_salt_divides_a_key_further() -> None:
    with serving_prefixes(api_keys=("one", "two")) as client:
        visits = (("one", None), ("two", None), ("one", None), ("one", "x"), ("two", "x"))
        answers = [post(client, key=key, cache_salt=salt) for key, salt in (*visits, visits[3])]
        assert [cached(answer) for answer in answers] == [0, 0, 32, 0, 0, 32]
        reasons = [answer["timings"]["cache_miss"] for answer in answers[:2]]
        assert reasons == [{"reason": "new", "at_token": 0}] * 2, "other keys' prompts are not told"


@pytest.mark.parametrize("bad", ["", "x" * 1001, 5, ["a"]])
def test_a_bad_salt_is_refused_by_name(client: httpx.Client, bad: Any) -> None:
    body = {"prompt": "a", "cache_salt": bad}
    assert assert_refused(client.post(PATH, json=body))["param"] == "cache_salt"


def test_an_answer_tells_why_the_prefix_hit_ended(client: httpx.Client) -> None:
    prompt = [ord("m")] * 40
    misses = [post(client, prompt=p)["timings"]["cache_miss"] for p in (prompt, prompt, [1, 2])]
    assert misses[0]["reason"] in ("new", "differs")
    assert misses[1:] == [None, {"reason": "too_short", "at_token": 0}]
    differs = post(client, prompt=[*prompt[:20], *[ord("n")] * 20])["timings"]["cache_miss"]
    assert differs == {"reason": "differs", "at_token": 20}


def chunks_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    raw = client.post(path, json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_cached_tokens_are_told_in_every_shape(client: httpx.Client, path: str) -> None:
    text = f"{path} " * 10
    own = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
    body: dict[str, Any] = {**own, "max_tokens": 2, "ignore_eos": True}
    first = client.post(path, json=body).json()
    assert cached(first) < 100
    expected = cached(client.post(path, json=body).json())
    assert expected > 128
    options = {"include_usage": True}
    *chunks, tail = chunks_of(client, path, {**body, "stream_options": options})
    assert tail["choices"] == []
    assert cached(tail) == expected
    assert all("usage" not in chunk for chunk in chunks)
    options["continuous_usage_stats"] = True
    chunks = chunks_of(client, path, {**body, "stream_options": options})
    assert cached(chunks[-1]) == cached(chunks[-2]) == expected


# ---- best_of -------------------------------------------------------------------------------------


def test_the_best_by_mean_logprob_are_shown_best_first(client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": LONG, "max_tokens": 5, "seed": 3, "ignore_eos": True}
    every = client.post(PATH, json={**body, "n": 6, "logprobs": 0}).json()["choices"]

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    expected = [choice["text"] for choice in sorted(every, key=mean, reverse=True)]
    answer = client.post(PATH, json={**body, "n": 2, "best_of": 6}).json()
    assert [choice["text"] for choice in answer["choices"]] == expected[:2]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 30, "what was computed, shown or not"
    assert answer["usage"]["prompt_tokens"] == 40


def test_every_prompt_has_its_own_best(client: httpx.Client) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "best_of": 3, "max_tokens": 3, "echo": True}
    answer = client.post(PATH, json=body).json()
    assert [c["text"][:2] for c in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]


def test_as_many_as_n_are_all_shown_and_may_be_streamed(client: httpx.Client) -> None:
    body = {"prompt": "a", "n": 2, "best_of": 2, "max_tokens": 2, "seed": 1}
    assert len(client.post(PATH, json=body).json()["choices"]) == 2
    assert {c["index"] for chunk in chunks_of(client, PATH, body) for c in chunk["choices"]} == {
        0,
        1,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 3},
        {"best_of": 2, "stream": True},
        {"best_of": 0},
        {"best_of": 129},
        {"best_of": True},
        {"best_of": 65, "prompt": ["a", "b"]},
    ],
)
def test_best_of_is_bounded_and_never_streamed(client: httpx.Client, fields: Any) -> None:
    error = assert_refused(client.post(PATH, json={"prompt": "a", **fields}))
    assert error["param"] == "best_of"
