"""What answers look like, streamed and not, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .scripted_engine import (
    ScriptedEngine,
    assert_refused,
    assert_works,
    byte_tokenizer,
    chat_body,
    says,
    serving,
)

TIMING_KEYS = {
    *("prompt_n", "cache_n", "cache_miss", "prompt_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_second"),
    *("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "end_to_end_ms"),
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


@pytest.fixture(scope="module")
def official(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official


USER: Any = [{"role": "user", "content": "hi"}]


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
        ("completions", {"logprobs": 1, "echo": True}),
        ("completions", {"top_logprobs": 1}),
    ],
)
def test_b72_inconsistent_logprobs(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    body = chat_body() if path.startswith("chat") else {"prompt": "a"}
    error = assert_refused(client.post(f"/v1/{path}", json={**body, **fields}))
    assert error["param"] in fields
    assert_works(client)


def test_models_health_and_unknown_names(client: httpx.Client, official: openai.OpenAI) -> None:
    assert [m.id for m in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").owned_by == "martlet"
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
    assert client.get("/health").json() == {"status": "ok"}
    unknown = client.get("/v1/models/org/other")
    assert assert_refused(unknown, 404)["code"] == "model_not_found"
    answer = client.post("/v1/chat/completions", json={**chat_body(), "model": "other"})
    assert assert_refused(answer, 404)["code"] == "model_not_found"
    assert_refused(client.get("/nowhere"), 404)
    assert_refused(client.get("/v1/completions"), 405)
    assert_works(client)


def test_alias_is_echoed() -> None:
    with serving(ScriptedEngine(), model_aliases=("gpt-x",)) as client:
        body = {**chat_body(), "model": "gpt-x"}
        assert client.post("/v1/chat/completions", json=body).json()["model"] == "gpt-x"


def test_model_without_template_still_completes() -> None:
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(None))) as client:
        error = assert_refused(client.post("/v1/chat/completions", json=chat_body()))
        assert "/v1/completions" in error["message"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_b76_template_refusal_is_a_400_with_its_text() -> None:
    template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}x"
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(template))) as client:
        messages = [{"role": "system", "content": "a"}]
        error = assert_refused(client.post("/v1/chat/completions", json={"messages": messages}))
        assert error["message"] == "no system here"
        assert_works(client)


def test_b60_tool_history_is_accepted(client: httpx.Client, engine: ScriptedEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200
    prompt = bytes(i for i in engine.requests[-1].prompt_ids if i < 256).decode()
    assert "None" not in prompt
    assert "null" not in prompt
