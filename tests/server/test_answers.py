"""What answers look like, streamed and not, through the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from .scripted_engine import ScriptedEngine
from .serving import chat_body, events, joined

TIMING_KEYS = {
    *("prompt_n", "cache_n", "cache_miss", "prompt_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_second"),
    *("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "end_to_end_ms", "draft_n"),
    *("draft_n_accepted", "draft_sources"),
}


USER: Any = [{"role": "user", "content": "hi"}]


def test_chat_answer(official: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = official.chat.completions.create(model="tiny", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.system_fingerprint == "martlet"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    n_prompt = len(engine.requests[-1].prompt_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == n_prompt
    assert answer.usage.completion_tokens == 6  # the end-of-generation token counts
    assert answer.usage.total_tokens == n_prompt + 6
    extra = answer.model_extra or {}
    assert set(extra["timings"]) == TIMING_KEYS
    phases = ("queue_ms", "prefill_ms", "predicted_ms")
    total = extra["timings"]["end_to_end_ms"]
    assert sum(extra["timings"][phase] for phase in phases) == pytest.approx(total)


def test_chat_stream_order(official: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = official.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
    first, *middle, last, tail = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "hello"
    assert all(c.choices[0].delta.role is None for c in middle)
    # B52: null in all but the last choice chunk
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert set((last.model_extra or {})["timings"]) == TIMING_KEYS
    assert tail.choices == []
    assert tail.usage is not None
    assert tail.usage.completion_tokens == 6
    assert set((tail.model_extra or {})["timings"]) == TIMING_KEYS


def test_b52_reasons_come_last_whatever_they_are(official: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": USER, "max_tokens": 3, "n": 2}
    chunks = list(official.chat.completions.create(**fields, stream=True))
    assert len({c.id for c in chunks}) == 1
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert [c.delta.role for c in choices if c.delta.role] == ["assistant"]
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 3}
    texts = list(official.completions.create(**fields, stream=True))
    assert [c.choices[0].finish_reason for c in texts] == [None] * (len(texts) - 1) + ["length"]
    assert len({c.id for c in texts}) == 1


def test_async_official_client(client: httpx.Client) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x") as official:
            texts = []
            for _ in range(2):  # the second shows that the connection was left in order
                stream = await official.chat.completions.create(
                    model="tiny", messages=USER, stream=True
                )
                texts.append("".join([c.choices[0].delta.content or "" async for c in stream]))
            return texts

    assert asyncio.run(run()) == ["hello", "hello"]


def test_completion_answer_and_stream(official: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = official.completions.create(model="tiny", prompt="once")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "hello"
    assert engine.requests[-1].prompt_ids == list(b"once")
    stream = official.completions.create(model="tiny", prompt="once", stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "hello"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(c.object == "text_completion" for c in chunks)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("<|im_end|>", [[258]]),  # a completions prompt is markup: clients render FIM themselves
    ],
)
def test_prompt_forms(
    client: httpx.Client, engine: ScriptedEngine, prompt: Any, expected: list[list[int]]
) -> None:
    n_before = len(engine.requests)
    answer = client.post("/v1/completions", json={"prompt": prompt, "echo": True}).json()
    assert [r.prompt_ids for r in engine.requests[n_before:]] == expected
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    if prompt != "<|im_end|>":
        shown = [bytes(ids).decode() + "hello" for ids in expected]
        assert [c["text"] for c in answer["choices"]] == shown


def test_echo_comes_first_in_a_stream(client: httpx.Client) -> None:
    chunks = events(client, "/v1/completions", {"prompt": "once ", "echo": True})
    assert joined(chunks) == "once hello"


def test_n_choices_interleave_with_own_seeds(client: httpx.Client, engine: ScriptedEngine) -> None:
    n_before = len(engine.requests)
    chunks = events(client, "/v1/chat/completions", chat_body(n=3, seed=7))
    assert [r.params.seed for r in engine.requests[n_before:]] == [7, 8, 9]
    for index in range(3):
        mine = [e for c in chunks[:-1] for e in c["choices"] if e["index"] == index]
        assert sum("role" in e["delta"] for e in mine) == 1
        assert "".join(e["delta"].get("content", "") for e in mine) == "hello"
        assert [e["finish_reason"] for e in mine if e["finish_reason"]] == ["stop"]
    answer = client.post("/v1/chat/completions", json=chat_body(n=3)).json()
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[-1].prompt_ids)


def test_seed_is_reported_where_it_was_chosen(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=chat_body()).json()
    assert answer["choices"][0]["seed"] == 77
    assert (
        client.post("/v1/chat/completions", json=chat_body(seed=0)).json()["choices"][0]["seed"]
        == 0
    )


def test_continuous_usage(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client, "/v1/chat/completions", chat_body(stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_sampling_fields_reach_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    fields = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 2**63 - 1,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "ignore_eos": True, "max_tokens": 4,
    }  # fmt: skip
    body = chat_body(**fields, stop=["x"], logit_bias={"5": -100, "6": 100})
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    params = engine.requests[-1].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ("x",)
    assert params.logit_bias == {5: -100, 6: 100}


def test_null_means_absent(client: httpx.Client, engine: ScriptedEngine) -> None:
    names = ("temperature", "top_p", "stop", "seed", "n", "max_tokens", "logprobs", "tools", "user")
    body = chat_body(**dict.fromkeys(names))
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[-1].params.temperature == 1.0
    assert engine.requests[-1].params.max_tokens is None


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 2},
        {"max_completion_tokens": 2, "max_tokens": 4},
        {"max_completion_tokens": 4, "max_tokens": 2},
    ],
)
def test_b58_smaller_limit_wins(client: httpx.Client, fields: dict[str, int]) -> None:
    for path, body in (("chat/completions", chat_body()), ("completions", {"prompt": "a"})):
        answer = client.post(f"/v1/{path}", json={**body, **fields}).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"
