"""/v1/responses, by OpenAI's own client and LangChain's over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from martlet.server.responses_schema import (
    REQUEST,
    Reasoning,
    ResponsesRequest,
    StreamOptions,
    Text,
)

from .scripted_engine import THINKING, ScriptedEngine, byte_tokenizer, says
from .serving import assert_refused, prompt_of, serving, wait_until
from .test_prefix_fields import serving_prefixes

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}
ANSWER_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [event.replace("output_text", "reasoning_text") for event in ANSWER_EVENTS]


SAYS = "hellö"


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> openai.OpenAI:
    return official(http)


def official(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0)


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Parsed events of a stream, each checked to carry its own name and number."""
    answer = http.post(PATH, json={**BODY, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(": "):
            continue
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Types in order, repeated ones once."""
    return list(dict.fromkeys(event["type"] for event in events))


def test_response_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    response = client.responses.create(
        model="tiny", input="hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5
    )
    assert response.output_text == "hellö"
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert (response.object, response.model, response.instructions) == (
        "response",
        "tiny",
        "Be kind.",
    )
    assert (response.metadata, response.temperature, response.tools) == ({"a": "b"}, 0.5, [])
    assert response.usage
    assert response.usage.input_tokens == len(engine.requests[-1].prompt_ids)
    assert response.usage.output_tokens == len("hellö".encode()) + 1
    total = response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.total_tokens == total
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert prompt_of(engine).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    assert response.id.startswith("resp_")


def test_order_of_events(http: httpx.Client) -> None:
    events = events_of(http)
    assert kinds_of(events) == [
        "response.created",
        "response.in_progress",
        *ANSWER_EVENTS,
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "hellö"
    assert all(delta["logprobs"] == [] for delta in deltas)
    places = {(e["item_id"], e["output_index"], e["content_index"]) for e in deltas}
    item = events[-1]["response"]["output"][0]
    assert places == {(item["id"], 0, 0)}
    assert events[-2]["item"] == item


def test_streamed_by_both_helpers(http: httpx.Client, client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "hellö"
    whole = client.responses.create(model="tiny", input="hi")
    varies = {"id", "created_at", "output", "timings"}
    assert final.model_dump(exclude=varies) == {
        **whole.model_dump(exclude=varies),
        **{key: value for key, value in final.model_dump(exclude=varies).items() if value is None},
    }

    async def other() -> str:
        url = f"{http.base_url}/v1"
        asynchronous = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
        text = ""
        async for event in await asynchronous.responses.create(
            model="tiny", input="hi", stream=True
        ):
            text += event.delta if event.type == "response.output_text.delta" else ""
        return text

    assert asyncio.run(other()) == "hellö"


def test_cut_short_is_incomplete(http: httpx.Client, client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "he")
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    last = events_of(http, max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_input_items(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "22"},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"role": "user", "content": "three"},
    ]
    client.responses.create(model="tiny", input=items)
    turns = [
        *(("system", "Be short."), ("user", "one"), ("assistant", ""), ("tool", "22")),
        *(("assistant", "two"), ("user", "three")),
    ]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns)
    assert prompt_of(engine) == shown + "<|im_start|>assistant\n"


def test_reasoning_and_calls_reach_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}:"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}"
        ";{% endfor %}"
    )
    engine = ScriptedEngine(tokenizer=byte_tokenizer(template))
    with serving(engine) as http:
        items: list[Any] = [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 2}'},
        ]
        assert http.post(PATH, json={**BODY, "input": items}).status_code == 200
    assert prompt_of(engine) == "user::a:;assistant:hm::f(1)g(2);"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_of_its_own(stream: bool) -> None:
    engine = ScriptedEngine(says("<think>hm</think>yes"), tokenizer=byte_tokenizer(THINKING))
    with serving(engine) as http:
        if stream:
            events = events_of(http)
            answer = [e for e in events if e.get("output_index") == 1]
            thoughts = [e for e in events if e.get("output_index") == 0]
            assert kinds_of(thoughts) == REASONING_EVENTS
            assert kinds_of(answer) == ANSWER_EVENTS
            with official(http).responses.stream(model="tiny", input="hi") as helper:
                response = helper.get_final_response()
        else:
            response = official(http).responses.create(model="tiny", input="hi")  # type: ignore[assignment]
        reasoning, message = response.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or []] == ["hm"]
        assert (message.type, response.output_text) == ("message", "yes")
        assert response.usage
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        off: Any = {"effort": "none"}
        official(http).responses.create(model="tiny", input="hi", reasoning=off)
        assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


def test_unfinished_reasoning_has_no_message_after_it() -> None:
    engine = ScriptedEngine(says("<think>hm, well"), tokenizer=byte_tokenizer(THINKING))
    with serving(engine) as http:
        response = official(http).responses.create(
            model="tiny", input="hi", max_output_tokens=len("<think>hm")
        )
        assert [item.type for item in response.output] == ["reasoning"]
        last = events_of(http, max_output_tokens=len("<think>hm"))[-1]["response"]
        assert [item["type"] for item in last["output"]] == ["reasoning"]
        assert last["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    with serving(ScriptedEngine(says(""))) as http:
        response = official(http).responses.create(model="tiny", input="hi")
        assert (len(response.output), response.output_text) == (1, "")
        kinds = kinds_of(events_of(http))
        assert kinds[2:-1] == [e for e in ANSWER_EVENTS if not e.endswith("delta")]


def test_logprobs_are_the_answers_alone() -> None:
    engine = ScriptedEngine(says("<think>hm</think>yes"), tokenizer=byte_tokenizer(THINKING))
    include: Any = ["message.output_text.logprobs"]
    with serving(engine) as http:
        response = official(http).responses.create(
            model="tiny", input="hi", include=include, top_logprobs=2
        )
        [part] = response.output[1].content  # type: ignore[union-attr, misc]
        assert [entry.token for entry in part.logprobs] == ["y", "e", "s", "<|im_end|>"]  # type: ignore[union-attr]
        assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr]
        events = events_of(http, include=include)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert [entry["token"] for d in deltas for entry in d["logprobs"]] == ["y", "e", "s"]
        [done] = [e for e in events if e["type"] == "response.output_text.done"]
        assert len(done["logprobs"]) == 4


@pytest.mark.parametrize("field", REQUEST.refused)
def test_fields_we_cannot_obey_are_refused_by_name(http: httpx.Client, field: str) -> None:
    assert field not in ResponsesRequest.model_fields
    error = assert_refused(http.post(PATH, json={**BODY, field: ["x"]}))
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    for neutral in REQUEST.refused[field].neutral:
        assert http.post(PATH, json={**BODY, field: neutral}).status_code == 200


def test_nothing_is_stored_and_that_is_said(client: openai.OpenAI) -> None:
    assert client.responses.create(model="tiny", input="hi").store is False  # type: ignore[attr-defined]
    assert client.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.BadRequestError, match="store: nothing is stored here"):
        client.responses.create(model="tiny", input="hi", store=True)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_nested_fields_are_refused_by_their_whole_name(http: httpx.Client) -> None:
    kinds = {"text": Text, "reasoning": Reasoning, "stream_options": StreamOptions}
    for name, kind in kinds.items():
        for field, rule in kind.RULES.refused.items():
            error = assert_refused(http.post(PATH, json={**BODY, name: {field: ["x"]}}))
            assert error["param"] == f"{name}.{field}"
            for neutral in rule.neutral:
                answer = http.post(PATH, json={**BODY, name: {field: neutral}})
                assert answer.status_code == 200
    schema = {"format": {"type": "json_schema", "name": "x"}}
    assert assert_refused(http.post(PATH, json={**BODY, "text": schema}))["param"] == "text.format"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "input"),
        (5, "input: must be a string or a list of items"),
        ([{"type": "item_reference", "id": "x"}], "input: item_reference: items of this type"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content: input_image"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
    ],
)
def test_bad_input_is_named(http: httpx.Client, given: Any, named: str) -> None:
    error = assert_refused(http.post(PATH, json={**BODY, "input": given}))
    assert error["message"].startswith(named)


def test_cached_tokens_are_within_the_input() -> None:
    with serving_prefixes() as http:
        client = official(http)
        first, second = (
            client.responses.create(model="tiny", input="q" * 60, max_output_tokens=1)
            for _ in range(2)
        )
        assert first.usage
        assert second.usage
        assert first.usage.input_tokens_details.cached_tokens == 0
        assert second.usage.input_tokens_details.cached_tokens > 0
        assert first.usage.input_tokens == second.usage.input_tokens


def test_failure_in_mid_stream_is_the_last_event() -> None:
    engine = ScriptedEngine(fail_at=2)
    with serving(engine) as http:
        last = events_of(http)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "scripted fault"}
        assert last["response"]["output"][0]["content"][0]["text"] == "he"
        engine.fail_at = 0
        assert_refused(http.post(PATH, json={**BODY, "stream": True}), 500)


def test_pings_are_comments() -> None:
    with serving(ScriptedEngine(prefill_s=0.3), grace_s=0.01, ping_s=0.05) as http:
        text = http.post(PATH, json={**BODY, "stream": True}).text
        assert text.count(": ping\n\n") >= 2
        with official(http).responses.stream(model="tiny", input="hi") as stream:
            assert stream.get_final_response().output_text == "hello"


def test_who_leaves_is_cancelled() -> None:
    engine = ScriptedEngine(says("x", end=False), token_s=0.01)
    with serving(engine) as http:
        with official(http).responses.create(model="tiny", input="hi", stream=True) as stream:
            assert next(iter(stream)).type == "response.created"
        wait_until(lambda: engine.n_unfinished == 0)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_invokes_and_streams(http: httpx.Client, use_responses_api: bool) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        model="tiny",
        base_url=f"{http.base_url}/v1",
        api_key="x",
        max_retries=0,
        max_tokens=100,
        use_responses_api=use_responses_api,
        stream_usage=True,
    )
    whole = model.invoke([("system", "Be kind."), ("human", "hi")])
    assert whole.text == "hellö"
    assert whole.usage_metadata["output_tokens"] == len("hellö".encode()) + 1
    chunks = list(model.stream("hi"))
    assert "".join(chunk.text for chunk in chunks) == "hellö"
