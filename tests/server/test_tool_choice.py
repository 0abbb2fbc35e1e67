"""Tools over a real socket: what the grammar enforces, whatever the model wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from .babbling import babbling
from .serving import chat_body, serving
from .tool_cases import (
    HERMES,
    MESSAGES,
    NOTE_ARGS,
    PATH,
    ROME,
    TEXT,
    THINKING_HERMES,
    TOOLS,
    WEATHER_ARGS,
    called,
    scripted,
    streamed,
)


@pytest.fixture(scope="module")
def babbler() -> Iterator[openai.OpenAI]:
    with babbling(HERMES) as client:
        yield openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)


def check_calls(calls: Any, names: set[str] = frozenset({"weather", "note"})) -> None:  # type: ignore[assignment]
    schemas = {"weather": WEATHER_ARGS, "note": NOTE_ARGS}
    assert calls
    for call in calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_required_always_calls(babbler: openai.OpenAI) -> None:
    for seed in range(3):
        answer = babbler.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
        )
        choice = answer.choices[0]
        if choice.finish_reason != "length":
            assert choice.finish_reason == "tool_calls"
            assert len(choice.message.tool_calls or []) == 1
            check_calls(choice.message.tool_calls)
            assert choice.message.content is None


def test_named_calls_that_one(babbler: openai.OpenAI) -> None:
    fields: Any = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    last, _ = streamed(babbler, seed=1, **fields)
    whole = babbler.chat.completions.create(model="tiny", messages=MESSAGES, seed=1, **fields)
    for choice in (last, whole.choices[0]):
        assert choice.finish_reason == "stop"  # as OpenAI has it
        assert len(choice.message.tool_calls or []) == 1
        check_calls(choice.message.tool_calls, {"weather"})


def test_allowed_tools_are_the_ones_to_be_called(babbler: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    for seed in range(3):
        answer = babbler.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},  # type: ignore[arg-type]
            parallel_tool_calls=False,
            seed=seed,
        )
        check_calls(answer.choices[0].message.tool_calls, {"weather"})


class Weather(pydantic.BaseModel):
    """Of a city."""

    days: int = pydantic.Field(ge=1, le=9)
    metric: bool


class Reply(pydantic.BaseModel):
    mood: bool


def test_parse_gives_arguments_as_models(babbler: openai.OpenAI) -> None:
    answer = babbler.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather, name="weather")],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=3,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_parse_with_tools_and_a_form(babbler: openai.OpenAI) -> None:
    kinds = set()
    for seed in range(12):
        answer = babbler.chat.completions.parse(
            model="tiny",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather, name="weather")],
            response_format=Reply,
            parallel_tool_calls=False,
            temperature=4.0,
            seed=seed,
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Reply) != bool(message.tool_calls)
        kinds.add(bool(message.tool_calls))
    assert kinds == {True, False}


def test_auto_is_free_until_the_marker_and_held_from_there() -> None:
    sound = "I could <tool_ call or <think. " + called("weather", ROME)
    for template in (HERMES, THINKING_HERMES):
        with serving(scripted(sound, template)) as client:
            answer = client.post(PATH, json=chat_body(tools=TOOLS)).json()["choices"][0]
            assert answer["message"]["content"] == "I could <tool_ call or <think."
            assert answer["message"]["tool_calls"][0]["function"]["arguments"] == ROME
        for bad in (
            called("weather", '{"city": "Paris", "days": 3}'),
            called("other", "{}"),
            "<tool_call>text",
            "hm " + called("weather", ROME) + called("weather", '{"days": 10'),
        ):
            with serving(scripted(bad, template)) as client:  # a script may not say what it may not
                assert client.post(PATH, json=chat_body(tools=TOOLS)).status_code == 500


def test_one_call_where_several_are_not_wanted() -> None:
    text = called("weather", ROME) + called("note", TEXT)
    with serving(scripted(text)) as client:
        body = chat_body(tools=TOOLS, parallel_tool_calls=False)
        choice = client.post(PATH, json=body).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"


def test_a_marker_within_the_reasoning_is_none() -> None:
    text = f"<think>\nI may <tool_call> it</think>\n{called('weather', ROME)}"
    with serving(scripted(text, THINKING_HERMES)) as client:
        for choice in ("auto", "required"):
            body = chat_body(tools=TOOLS, tool_choice=choice)
            message = client.post(PATH, json=body).json()["choices"][0]["message"]
            assert message["reasoning_content"] == "I may <tool_call> it"
            assert message["tool_calls"][0]["function"]["arguments"] == ROME
            assert message["content"] is None
