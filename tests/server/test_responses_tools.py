"""Function tools on /v1/responses, by OpenAI's own client and LangChain's over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from .babbling import babbling
from .serving import assert_refused, prompt_of, serving
from .test_responses import BODY, PATH, REASONING_EVENTS, events_of, kinds_of, official
from .tool_cases import (
    HERMES,
    LLAMA,
    NOTE_ARGS,
    ROME,
    TEXT,
    THINKING_HERMES,
    WEATHER,
    WEATHER_ARGS,
    called,
    scripted,
)


def flat(name: str, parameters: Any, **rest: Any) -> Any:
    return {"type": "function", "name": name, "parameters": parameters, "strict": True, **rest}


TOOLS = [flat("weather", WEATHER_ARGS, description="Of a city."), flat("note", NOTE_ARGS)]
TWO = "One moment.\n" + called("weather", ROME) + "\n" + called("note", TEXT)
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def babbler() -> Iterator[httpx.Client]:
    with babbling(HERMES) as client:
        yield client


@pytest.mark.parametrize("thoughts", ["", "<think>\nhm</think>\n"])
def test_calls_are_items_of_their_own(thoughts: str) -> None:
    with serving(scripted(thoughts + TWO, THINKING_HERMES if thoughts else HERMES)) as http:
        client = official(http)
        whole = client.responses.create(model="tiny", input="hi", tools=TOOLS)
        with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert response.status == "completed"
        assert response.output_text == "One moment."
        calls = [item for item in response.output if item.type == "function_call"]
        expected = ["reasoning"] * bool(thoughts) + ["message", "function_call", "function_call"]
        assert [item.type for item in response.output] == expected
        assert [(call.name, call.arguments) for call in calls] == [
            ("weather", ROME),
            ("note", TEXT),
        ]
        assert len({call.call_id for call in calls}) == 2
        assert len({item.id for item in response.output}) == len(expected)
        assert all(call.status == "completed" for call in calls)
        assert [tool.name for tool in response.tools if tool.type == "function"] == [
            "weather",
            "note",
        ]
        assert response.tool_choice == "auto"


def test_order_of_events() -> None:
    with serving(scripted("<think>\nhm</think>\n" + TWO, THINKING_HERMES)) as http:
        events = events_of(http, tools=TOOLS)
    at = [[e for e in events if e.get("output_index") == nth] for nth in range(4)]
    assert kinds_of(at[0]) == REASONING_EVENTS
    assert kinds_of(at[2]) == kinds_of(at[3]) == CALL_EVENTS
    indices = [e["output_index"] for e in events if "output_index" in e]
    assert indices == sorted(indices)  # each item ends before the next begins
    for of_item, (name, arguments) in zip(at[2:], (("weather", ROME), ("note", TEXT)), strict=True):
        added, *deltas, done, ended = of_item
        item_id = added["item"]["id"]
        assert (added["item"]["arguments"], added["item"]["status"]) == ("", "in_progress")
        assert len(deltas) > 5  # as they are written
        assert "".join(delta["delta"] for delta in deltas) == arguments
        assert all(e["item_id"] == item_id for e in (*deltas, done))
        assert not any("content_index" in e for e in of_item)
        assert (done["name"], done["arguments"]) == (name, arguments)
        assert ended["item"] == {
            **added["item"],
            "arguments": arguments,
            "status": "completed",
        }
    assert events[-1]["response"]["output"] == [of_item[-1]["item"] for of_item in at]


def test_text_behind_a_call_is_a_message_behind_it() -> None:
    text = f'{{"name": "weather", "parameters": {ROME}}} So be it.'
    with serving(scripted(text, LLAMA)) as http:
        whole = http.post(PATH, json={**BODY, "tools": TOOLS}).json()["output"]
        streamed = events_of(http, tools=TOOLS)[-1]["response"]["output"]
    for output in (whole, streamed):
        assert [item["type"] for item in output] == ["function_call", "message"]
        assert output[0]["arguments"] == ROME
        assert output[1]["content"][0]["text"].strip() == "So be it."


def test_a_call_that_is_cut_is_incomplete() -> None:
    text = called("weather", ROME)
    n = len('<tool_call>\n{"name": "weather", "arguments": {"ci')
    with serving(scripted(text)) as http:
        response = official(http).responses.create(
            model="tiny", input="hi", tools=TOOLS, max_output_tokens=n
        )
        last = events_of(http, tools=TOOLS, max_output_tokens=n)[-1]["response"]
    assert response.status == last["status"] == "incomplete"
    [call] = response.output
    assert call.type == "function_call"
    assert (call.arguments, call.status) == ('{"ci', "incomplete")
    assert last["output"][0]["arguments"] == '{"ci'


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "note"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "note"}],
            },
            {"note"},
        ),
    ],
)
def test_choices_are_enforced(babbler: httpx.Client, choice: Any, names: set[str]) -> None:
    schemas: dict[str, Any] = {"weather": WEATHER_ARGS, "note": NOTE_ARGS}
    for seed in range(2):
        response = official(babbler).responses.create(
            model="tiny",
            input="hi",
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            extra_body={"seed": seed},
        )
        [call] = response.output
        assert call.type == "function_call"
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        dumped = response.model_dump(exclude_unset=True)
        assert (dumped["tool_choice"], dumped["parallel_tool_calls"]) == (choice, False)


def test_auto_none_and_no_tools() -> None:
    with serving(scripted("Just text.")) as http:
        client = official(http)
        assert client.responses.create(model="tiny", input="hi", tools=TOOLS).output_text
    engine = scripted(called("weather", ROME))
    with serving(engine) as http:
        fields: Any
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            response = official(http).responses.create(model="tiny", input="hi", **fields)
            assert response.output_text == called("weather", ROME)
            assert "<tools>" not in prompt_of(engine)


class Weather(pydantic.BaseModel):
    """Of a city."""

    days: int = pydantic.Field(ge=1, le=9)
    metric: bool


def test_parse_gives_arguments_as_models(babbler: httpx.Client) -> None:
    response = official(babbler).responses.parse(
        model="tiny",
        input="hi",
        tools=[openai.pydantic_function_tool(Weather, name="weather")],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"seed": 3},
    )
    [call] = response.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Weather)


def test_a_conversation_goes_on_from_its_own_output() -> None:
    engine = scripted(TWO)
    with serving(engine) as http:
        client = official(http)
        first = client.responses.create(model="tiny", input="hi", tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        items: Any = [
            {"role": "user", "content": "hi"},
            *first.output,
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "noted"}],
            },
        ]
        client.responses.create(model="tiny", input=items, tools=TOOLS)
    prompt = prompt_of(engine)
    shown = prompt.split("<tools>")[1].split("</tools>")[0]
    assert shown.startswith(json.dumps(WEATHER)[:-2])
    # Text and calls of one answer are one turn, as the model wrote them.
    turn = prompt.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    assert turn.startswith("One moment.<tool_call>")
    assert (turn.count("<tool_call>"), ROME in turn, TEXT in turn) == (2, True, True)
    assert prompt.index("sunny") < prompt.index("noted")


def test_logprobs_are_the_texts_alone() -> None:
    include: Any = ["message.output_text.logprobs"]
    with serving(scripted("Hm." + called("note", TEXT))) as http:
        response = official(http).responses.create(
            model="tiny", input="hi", tools=TOOLS, include=include
        )
        events = events_of(http, tools=TOOLS, include=include)
    [part] = response.output[0].content  # type: ignore[union-attr, misc]
    assert [entry.token for entry in part.logprobs] == ["H", "m", "."]  # type: ignore[union-attr]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [
        entry.model_dump()
        for entry in part.logprobs  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "allowed_tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "gone"}},
            "tool_choice",
            "gone",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", ""),
        ({"tools": TOOLS[:1] * 2}, "tools[1].name", "before"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search: only functions"),
        ({"tools": [WEATHER]}, "tools[0].name", ""),
        ({"tools": [flat("f", {"uniqueItems": True})]}, "tools[0].parameters", "uniqueItems"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]", "call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]", "call_id"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, named: str) -> None:
    with serving(scripted("ok")) as http:
        error = assert_refused(http.post(PATH, json={**BODY, **fields}))
        assert error["param"] == param
        assert named in error["message"]


def test_langchain_binds_tools() -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    with serving(scripted(TWO)) as http:
        model = langchain.ChatOpenAI(
            model="tiny",
            base_url=f"{http.base_url}/v1",
            api_key="x",
            max_retries=0,
            use_responses_api=True,
        ).bind_tools([WEATHER, {"name": "note", "description": "", "parameters": NOTE_ARGS}])
        whole = model.invoke("hi")
        *_, streamed = _summed(model.stream("hi"))
    for message in (whole, streamed):
        assert [call["name"] for call in message.tool_calls] == ["weather", "note"]
        assert [call["args"] for call in message.tool_calls] == [json.loads(ROME), json.loads(TEXT)]


def _summed(chunks: Iterator[Any]) -> Iterator[Any]:
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
        yield total
