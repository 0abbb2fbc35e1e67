"""Scores of prompts over HTTP: legacy `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.tokenizer import Tokenizer

from ..runtime.scripted import ScriptedExecutor, hashed_logits
from .scripted_engine import BOS, byte_tokenizer
from .serving import assert_refused, serving_engine

PATH = "/v1/completions"
SCRIPT = hashed_logits()


@contextlib.contextmanager
def serving(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    engine = Engine(ScriptedExecutor(SCRIPT), tokenizer, context=256)
    with serving_engine(engine, tokenizer, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(byte_tokenizer()) as client:
        yield client


def post(client: httpx.Client, path: str = PATH, **fields: Any) -> Any:
    answer = client.post(path, json={"max_tokens": 1, "temperature": 0, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def log_softmax(ids: list[int]) -> np.ndarray:
    logits = np.asarray(SCRIPT(np.array(ids, np.int32)), np.float64)
    return logits - np.log(np.exp(logits).sum())


def scores(ids: list[int]) -> list[float]:
    return [float(log_softmax(ids[:i])[ids[i]]) for i in range(1, len(ids))]


def test_echo_lists_the_prompt_then_the_answer(client: httpx.Client) -> None:
    (choice,) = post(client, prompt="héllo", echo=True, logprobs=2, max_tokens=3)["choices"]
    ids = list("héllo".encode())
    logprobs = choice["logprobs"]
    assert set(map(len, logprobs.values())) == {len(ids) + 3}
    assert choice["text"].startswith("héllo")
    assert logprobs["tokens"][:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
    assert logprobs["text_offset"][:7] == [0, 1, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:6] == pytest.approx(scores(ids), abs=1e-5)
    for place, top in enumerate(logprobs["top_logprobs"][1:6], 1):
        assert max(top.values()) == pytest.approx(log_softmax(ids[:place]).max(), abs=1e-5)
        assert logprobs["token_logprobs"][place] in top.values()
        assert len(top) in (2, 3)


def test_lists_of_prompts_as_text_and_ids_are_scored_alike(client: httpx.Client) -> None:
    texts = [f"prompt number {i}" for i in range(10)]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1}
    with ThreadPoolExecutor(8) as pool:
        forms: list[Any] = [texts, [list(text.encode()) for text in texts]] * 4
        answers = list(pool.map(lambda form: post(client, prompt=form, **fields), forms))
    expected = [scores(list(text.encode())) for text in texts]
    for answer in answers:
        assert [choice["index"] for choice in answer["choices"]] == list(range(10))
        for choice, wanted in zip(answer["choices"], expected, strict=True):
            assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
        assert answer["choices"] == answers[0]["choices"], "the same bits in any company"


def test_nothing_need_be_drawn(client: httpx.Client) -> None:
    answer = post(client, prompt="abcd", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        scores(list(b"abcd")), abs=1e-5
    )
    assert answer["usage"]["completion_tokens"] == 0
    (bare,) = post(client, prompt="abcd", echo=True, max_tokens=0)["choices"]
    assert (bare["text"], bare["logprobs"]) == ("abcd", None)
    assert_refused(client.post(PATH, json={"prompt": "a", "max_tokens": 0}))


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_adds_up_to_the_whole_answer(client: httpx.Client, max_tokens: int) -> None:
    body = {"prompt": ["ab", "cde"], "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    whole = post(client, **body)["choices"]
    streamed: list[Any] = [{"text": ""}, {"text": ""}]
    lines = client.post(PATH, json={"temperature": 0, **body, "stream": True}).text
    for line in lines.split("\n\n")[:-2]:
        for piece in json.loads(line.removeprefix("data: "))["choices"]:
            into = streamed[piece["index"]]
            into["text"] += piece["text"]
            for name, values in (piece["logprobs"] or {}).items():
                into.setdefault("logprobs", {}).setdefault(name, []).extend(values)
    for choice, pieces in zip(whole, streamed, strict=True):
        assert pieces == {"text": choice["text"], "logprobs": choice["logprobs"]}


def test_prompt_logprobs_as_vllm_writes_them(client: httpx.Client) -> None:
    both = post(client, prompt=["abc", "xy"], prompt_logprobs=1)["choices"]
    for choice, text in zip(both, (b"abc", b"xy"), strict=True):
        first, *rest = choice["prompt_logprobs"]
        assert (first, choice["logprobs"]) == (None, None)
        for place, listed in enumerate(rest, 1):
            expected = log_softmax(list(text[:place]))
            own, best = listed[str(text[place])], listed[str(expected.argmax())]
            assert own["logprob"] == pytest.approx(expected[text[place]], abs=1e-5)
            assert own["decoded_token"] == chr(text[place])
            assert own["rank"] == 1 + (expected > expected[text[place]]).sum()
            assert best["rank"] == 1
    messages = [{"role": "user", "content": "hi"}]
    chat = post(client, "/v1/chat/completions", messages=messages, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(listed) == 1 for listed in chat["prompt_logprobs"][1:])


def test_more_may_be_asked_of_the_prompt_than_of_the_answer(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 5}
    (choice,) = post(client, **fields)["choices"]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(listed) >= 5 for listed in choice["prompt_logprobs"][1:])


def test_several_answers_repeat_the_same_scores(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 1, "n": 2}
    first, second = post(client, **fields, temperature=1)["choices"]
    assert first["logprobs"]["token_logprobs"][:3] == second["logprobs"]["token_logprobs"][:3]


def test_control_tokens_have_a_place_where_the_text_spells_them(client: httpx.Client) -> None:
    text = "a<|im_end|>b"
    (choice,) = post(client, prompt=text, echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 11, 12]
    with serving(byte_tokenizer(add_bos=True)) as with_bos:
        (choice,) = post(with_bos, prompt="ab", echo=True, logprobs=0)["choices"]
        assert choice["logprobs"]["tokens"][:3] == ["<s>", "a", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
        expected = scores([BOS, *b"ab"])
        assert choice["logprobs"]["token_logprobs"][1:3] == pytest.approx(expected, abs=1e-5)


def test_the_official_client_reads_it(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        answer = official.completions.create(
            model="tiny", prompt=list(b"abc"), echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[1:3] == pytest.approx(scores(list(b"abc")), abs=1e-5)
