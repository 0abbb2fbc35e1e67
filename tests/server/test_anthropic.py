"""Anthropic's dialect, by its own client over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from martlet.server.anthropic_schema import REQUEST, OutputConfig, Thinking

from .scripted_engine import CHATML, OPENED, THINKING, ScriptedEngine, byte_tokenizer, says
from .serving import prompt_of, serving, wait_until
from .test_prefix_fields import serving_prefixes

PATH = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}


SAYS = "hellö"


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> anthropic.Anthropic:
    return official(http)


def official(http: httpx.Client, key: str = "x") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(http.base_url), api_key=key, max_retries=0)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    error: dict[str, str] = body["error"]
    assert set(error) == {"type", "message"}
    return error


def same(first: anthropic.types.Message, second: anthropic.types.Message) -> bool:
    """But for the ids, and for keys of which only one client knows the default."""
    shown = [message.to_dict(exclude_none=True) for message in (first, second)]
    return len({message.pop("id") for message in shown}) == 2 and shown[0] == shown[1]


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Parsed events of a stream, each checked to carry its own name."""
    answer = http.post(PATH, json={**BODY, "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_message_whole(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    message = client.messages.create(
        model="tiny", max_tokens=100, messages=HI, system="Be kind.", metadata={"user_id": "u"}
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hellö"}]
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(engine.requests[-1].prompt_ids)
    assert message.usage.output_tokens == len("hellö".encode()) + 1
    assert prompt_of(engine).startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_streamed_by_both_clients(http: httpx.Client, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == "hellö"
        final = stream.get_final_message()
    whole = client.messages.create(model="tiny", max_tokens=100, messages=HI)
    assert same(final, whole)

    async def other() -> str:
        url = str(http.base_url)
        asynchronous = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        text = ""
        async with asynchronous.messages.stream(
            model="tiny", max_tokens=100, messages=HI
        ) as stream:
            async for piece in stream.text_stream:
                text += piece
        return text

    assert asyncio.run(other()) == "hellö"


def test_order_of_events(http: httpx.Client) -> None:
    events = events_of(http)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len("hellö".encode()) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "he", "max_tokens", None),
        ({"stop_sequences": ["x", "l"]}, "he", "stop_sequence", "l"),
        ({"stop_sequences": ["ll", "ell"]}, "h", "stop_sequence", "ell"),
        ({"stop_sequences": ["x"]}, "hellö", "end_turn", None),
    ],
)
def test_why_it_stopped(
    client: anthropic.Anthropic,
    stream: bool,
    fields: dict[str, Any],
    text: str,
    reason: str,
    sequence: str | None,
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI, **fields}
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert [block.text for block in message.content if block.type == "text"] == [text]
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_the_end_of_the_context_is_another_reason() -> None:
    with serving(ScriptedEngine(says("x", end=False), context=64)) as http:
        message = official(http).messages.create(model="tiny", max_tokens=1000, messages=HI)
        assert message.stop_reason == "model_context_window_exceeded"


def test_an_answer_without_text() -> None:
    with serving(ScriptedEngine(says(""))) as http:
        assert official(http).messages.create(**BODY).content == []
        with official(http).messages.stream(**BODY) as stream:
            assert stream.get_final_message().content == []


def test_content_blocks(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    cached = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    system: Any = [cached, {"type": "text", "text": "Be short."}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "yes"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "22"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    client.messages.create(model="tiny", max_tokens=5, messages=messages, system=system)
    turns = [
        *(("system", "Be kind.\n\nBe short."), ("user", "one\n\ntwo"), ("assistant", "yes")),
        *(("tool", "22"), ("user", "and?")),
    ]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns)
    assert prompt_of(engine) == shown + "<|im_start|>assistant\n"


def test_an_assistants_last_message_is_continued(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    messages: Any = [*HI, {"role": "assistant", "content": "The answer ("}]
    client.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nThe answer (")
    messages[-1]["content"] = ""
    with pytest.raises(anthropic.BadRequestError, match="nothing to continue"):
        client.messages.create(model="tiny", max_tokens=5, messages=messages)


@pytest.mark.parametrize("kind", ["image", "document", "redacted_thinking", "server_tool_use"])
def test_other_blocks_are_refused_by_name(client: anthropic.Anthropic, kind: str) -> None:
    messages: Any = [{"role": "user", "content": [{"type": kind}]}]
    with pytest.raises(anthropic.BadRequestError, match=f"blocks of type {kind}") as caught:
        client.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert "messages[0].content" in str(caught.value)


@pytest.mark.parametrize("field", REQUEST.refused)
def test_fields_we_cannot_obey_are_refused_by_name(http: httpx.Client, field: str) -> None:
    error = error_of(http.post(PATH, json={**BODY, field: ["x"]}))
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field}: ")
    for neutral in REQUEST.refused[field].neutral:
        assert http.post(PATH, json={**BODY, field: neutral}).status_code == 200


@pytest.mark.parametrize("field", sorted(REQUEST.no_effect))
def test_bookkeeping_passes(http: httpx.Client, field: str) -> None:
    answer = http.post(PATH, json={**BODY, field: {}})
    assert answer.status_code == 200
    assert "x-martlet-ignored" not in answer.headers


def test_nested_fields_are_refused_by_their_whole_name(http: httpx.Client) -> None:
    for name, kind, rest in (
        ("thinking", Thinking, {"type": "disabled"}),
        ("output_config", OutputConfig, {}),
    ):
        for field in kind.RULES.refused:
            error = error_of(http.post(PATH, json={**BODY, name: {**rest, field: "x"}}))
            assert error["message"].startswith(f"{name}.{field}: ")
    answer = http.post(PATH, json={**BODY, "thinking": {"type": "disabled", "frob": 1}})
    assert answer.headers["x-martlet-ignored"] == "thinking.frob"


def test_max_tokens_is_needed(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": HI}
    assert error_of(http.post(PATH, json=body))["message"].startswith("max_tokens: ")
    assert error_of(http.post(PATH, content=b"{", headers={"content-type": "application/json"}))


def test_sampling_reaches_the_engine(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    sampler = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "seed": 3}
    client.messages.create(**BODY, stop_sequences=["x"], extra_body=sampler)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.4, 3)
    assert (params.stop, params.seed, params.max_tokens) == (("x",), 3, 100)


CLOSED = "<think>\n\n</think>\n\n"


def test_thinking() -> None:
    engine = ScriptedEngine(says("<think>hm</think>yes"), tokenizer=byte_tokenizer(THINKING))
    with serving(engine) as http:
        client = official(http)
        adaptive: Any = {"type": "adaptive"}
        message = client.messages.create(**BODY, thinking=adaptive)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "hm"  # type: ignore[union-attr]
        assert message.content[1].text == "yes"  # type: ignore[union-attr]
        assert not prompt_of(engine).endswith(CLOSED)
        with client.messages.stream(**BODY, thinking=adaptive) as stream:
            streamed = stream.get_final_message()
        assert same(streamed, message)
        assert [e["index"] for e in events_of(http) if e["type"] == "content_block_start"] == [0, 1]
        # Not asked for, it is off, as in this API.
        assert prompt_of(engine).endswith(CLOSED)
        client.messages.create(**BODY, thinking={"type": "disabled"})
        assert prompt_of(engine).endswith(CLOSED)
        budget: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match=r"thinking.budget_tokens: a budget"):
            client.messages.create(**BODY, thinking=budget)


def test_thinking_a_model_cannot_do_or_leave() -> None:
    for template, kind, works in (
        (CHATML, "adaptive", False),
        (CHATML, "disabled", True),
        (OPENED, "disabled", False),
        (OPENED, "adaptive", True),
    ):
        engine = ScriptedEngine(says("hm</think>yes"), tokenizer=byte_tokenizer(template))
        with serving(engine) as http:
            answer = http.post(PATH, json={**BODY, "thinking": {"type": kind}})
            assert answer.status_code == (200 if works else 400)
            assert works or error_of(answer)["message"].startswith("thinking: ")


def test_count_tokens(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    n_before = len(engine.requests)
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="Be kind.")
    assert len(engine.requests) == n_before
    message = client.messages.create(**BODY, system="Be kind.")
    assert counted.input_tokens == message.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=HI)
    server_tool: Any = {"type": "bash_20250124", "name": "bash"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type"):
        client.messages.count_tokens(model="tiny", messages=HI, tools=[server_tool])


def test_cached_tokens_stand_beside_the_input() -> None:
    long = [{"role": "user", "content": "q" * 60}]
    with serving_prefixes() as http:
        client = official(http)
        first = client.messages.create(model="tiny", max_tokens=1, messages=long)
        second = client.messages.create(model="tiny", max_tokens=1, messages=long)
        assert first.usage.cache_read_input_tokens == 0
        n_cached = second.usage.cache_read_input_tokens
        assert n_cached
        assert second.usage.input_tokens + n_cached == first.usage.input_tokens
        with client.messages.stream(model="tiny", max_tokens=1, messages=long) as stream:
            assert stream.get_final_message().usage == second.usage


def test_errors_have_this_dialects_shape(http: httpx.Client, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", max_tokens=5, messages=HI)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert error_of(http.get(PATH), 405)
    assert error_of(http.post(f"{PATH}/batches", json={}), 404)
    long: Any = [{"role": "user", "content": "q" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="context is 4096"):
        client.messages.create(model="tiny", max_tokens=5, messages=long)


def test_keys_of_this_dialect_open() -> None:
    with serving(ScriptedEngine(), api_keys=("secret",)) as http:
        assert official(http, "secret").messages.create(**BODY).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            official(http, "wrong").messages.create(**BODY)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert error_of(http.post(f"{PATH}/count_tokens", json=BODY), 401)


def test_pings_while_waiting() -> None:
    with serving(ScriptedEngine(prefill_s=0.3), grace_s=0.01, ping_s=0.05) as http:
        kinds = [event["type"] for event in events_of(http)]
        assert kinds[:3] == ["message_start", "ping", "ping"]
        assert "ping" not in kinds[kinds.index("content_block_start") :]
        with official(http).messages.stream(**BODY) as stream:
            assert stream.get_final_text() == "hello"


def test_failure_before_and_in_mid_stream() -> None:
    engine = ScriptedEngine(fail_at=2)
    with serving(engine) as http:
        last = events_of(http)[-1]
        assert last == {
            "type": "error",
            "error": {"type": "api_error", "message": "scripted fault"},
        }
        with (
            pytest.raises(anthropic.APIStatusError, match="scripted fault"),
            official(http).messages.stream(**BODY) as stream,
        ):
            stream.get_final_message()
        engine.fail_at = 0
        with pytest.raises(anthropic.InternalServerError, match="scripted fault"):
            official(http).messages.create(**BODY)
        error = error_of(http.post(PATH, json={**BODY, "stream": True}), 500)
        assert error["type"] == "api_error"


def test_who_leaves_is_cancelled() -> None:
    engine = ScriptedEngine(says("x", end=False), token_s=0.01)
    with serving(engine) as http:
        with official(http).messages.stream(**{**BODY, "max_tokens": 4000}) as stream:
            next(iter(stream.text_stream))
        wait_until(lambda: engine.n_unfinished == 0)
