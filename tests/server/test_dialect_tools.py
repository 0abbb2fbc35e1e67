"""Tools and answers of a given form in the dialects of Anthropic, Ollama and responses, by their
own clients over a real socket."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pydantic
import pytest

from .babbling import babbling
from .scripted_engine import ScriptedEngine
from .serving import prompt_of, serving
from .tool_cases import (
    HERMES,
    NOTE_ARGS,
    ROME,
    TEXT,
    THINKING_HERMES,
    TOOLS,
    WEATHER,
    WEATHER_ARGS,
    called,
    scripted,
)

HI: Any = [{"role": "user", "content": "hi"}]
TWO = "One moment.\n" + called("weather", ROME) + "\n" + called("note", TEXT)
ARGUMENTS = [json.loads(ROME), json.loads(TEXT)]


class Verdict(pydantic.BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


class Mood(pydantic.BaseModel):
    mood: Literal["good", "bad"]
    marks: list[bool] = pydantic.Field(max_length=3)


@pytest.fixture(scope="module")
def babbler() -> Iterator[httpx.Client]:
    with babbling(HERMES) as client:
        yield client


# ---- Anthropic -----------------------------------------------------------------------------------

CLAUDE_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": WEATHER_ARGS},
    {"name": "note", "input_schema": NOTE_ARGS},
]


def anthropic_of(http: httpx.Client) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(http.base_url), api_key="x", max_retries=0)


@contextlib.contextmanager
def claude(engine: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    with serving(engine) as http:
        yield anthropic_of(http)


@pytest.mark.parametrize("thoughts", ["", "<think>\nhm</think>\n"])
def test_anthropic_calls_are_blocks(thoughts: str) -> None:
    template = THINKING_HERMES if thoughts else HERMES
    asked: Any = {"model": "tiny", "max_tokens": 500, "messages": HI, "tools": CLAUDE_TOOLS}
    with claude(scripted(thoughts + TWO, template)) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        expected = ["thinking"] * bool(thoughts) + ["text", "tool_use", "tool_use"]
        assert [block.type for block in message.content] == expected
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.name for call in calls] == ["weather", "note"]
        assert [call.input for call in calls] == ARGUMENTS
        assert len({call.id for call in calls}) == 2
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(expected)
    assert kinds.count("input_json") > 10  # as they are written


def test_anthropic_choices_are_enforced(babbler: httpx.Client) -> None:
    client = anthropic_of(babbler)
    for seed, choice in enumerate(
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
        )
    ):
        message = client.messages.create(
            model="tiny",
            max_tokens=900,
            messages=HI,
            tools=CLAUDE_TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
            extra_body={"seed": seed},
        )
        [block] = message.content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, {"weather": WEATHER_ARGS, "note": NOTE_ARGS}[block.name])
        assert message.stop_reason == "tool_use"
        assert "name" not in choice or block.name == choice["name"]


def test_anthropic_parses_an_answer_of_a_form(babbler: httpx.Client) -> None:
    # This client leaves bounds of lists and numbers out of the schema it sends.
    message = anthropic_of(babbler).messages.parse(
        model="tiny", max_tokens=900, messages=HI, output_format=Verdict
    )
    assert isinstance(message.parsed_output, Verdict)


def test_anthropic_history_and_count(babbler: httpx.Client) -> None:
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": json.loads(ROME)}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    history: Any = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    engine = scripted("ok")
    with claude(engine) as client:
        message = client.messages.create(
            model="tiny", max_tokens=9, messages=history, tools=CLAUDE_TOOLS
        )
        counted = client.messages.count_tokens(model="tiny", messages=history, tools=CLAUDE_TOOLS)
        assert counted.input_tokens == message.usage.input_tokens
    prompt = prompt_of(engine)
    assert json.dumps(WEATHER) in prompt
    assert f'"arguments": {ROME}' in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice: a name"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool 'x'"),
        ({"tools": [CLAUDE_TOOLS[0]] * 2}, "tools[1].name"),
        (
            {"tools": [{"name": "f", "input_schema": {"not": {}}}]},
            "tools[0].input_schema: Unimplemented keys",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "messages": [*HI, {"role": "assistant", "content": "{"}],
            },
            "begins anew",
        ),
    ],
)
def test_anthropic_refusals(babbler: httpx.Client, fields: dict[str, Any], named: str) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": HI, **fields}
    answer = babbler.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


# ---- Ollama --------------------------------------------------------------------------------------


def ollama_of(http: httpx.Client) -> ollama.Client:
    return ollama.Client(host=str(http.base_url), trust_env=False)


def test_ollama_shows_calls_whole() -> None:
    with serving(scripted(TWO)) as http:
        client = ollama_of(http)
        assert "tools" in (client.show("tiny").capabilities or [])
        whole = client.chat("tiny", HI, tools=TOOLS)
        chunks = list(client.chat("tiny", HI, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.message.tool_calls or []]
    for found in (whole.message.tool_calls or [], calls):
        assert [call.function.name for call in found] == ["weather", "note"]
        assert [call.function.arguments for call in found] == ARGUMENTS
    assert whole.message.content == "One moment."
    assert "".join(chunk.message.content or "" for chunk in chunks) == "One moment."
    assert whole.done_reason == chunks[-1].done_reason == "stop"


def test_ollama_shows_no_call_that_was_cut() -> None:
    with serving(scripted(TWO)) as http:
        n = len(TWO) - 30
        answer = ollama_of(http).chat("tiny", HI, tools=TOOLS, options={"num_predict": n})
        assert [c.function.name for c in answer.message.tool_calls or []] == ["weather"]
        assert answer.done_reason == "length"


def test_ollama_formats(babbler: httpx.Client) -> None:
    client = ollama_of(babbler)
    schema = Mood.model_json_schema()
    for seed in range(2):
        options = {"seed": seed, "num_predict": 900}
        answer = client.chat("tiny", HI, format=schema, options=options)
        Mood.model_validate_json(answer.message.content or "")
        written = client.generate("tiny", "hi", format=schema, options=options)
        Mood.model_validate_json(written.response)
    any_object = client.generate("tiny", "hi", format="json", options={"num_predict": 5})
    assert any_object.response.startswith("{")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"format": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/generate", {"tools": TOOLS}, "tools: belongs to /api/chat"),
        ("/api/chat", {"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type"),
    ],
)
def test_ollama_refusals(
    babbler: httpx.Client, path: str, fields: dict[str, Any], named: str
) -> None:
    body = {"model": "tiny", "messages" if path == "/api/chat" else "prompt": HI, **fields}
    answer = babbler.post(path, json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]


# ---- responses -----------------------------------------------------------------------------------


def test_responses_parse_an_answer_of_a_form(babbler: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{babbler.base_url}/v1", api_key="x", max_retries=0)
    response = client.responses.parse(model="tiny", input="hi", text_format=Mood)
    assert isinstance(response.output_parsed, Mood)
    assert response.text
    assert response.text.format
    assert response.text.format.type == "json_schema"
    any_object = client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=16
    )
    assert any_object.output_text.startswith("{")
    bad: Any = {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.responses.create(model="tiny", input="hi", text={"format": bad})
    with pytest.raises(openai.BadRequestError, match=r"use text\.format"):
        client.responses.create(model="tiny", input="hi", extra_body={"guided_regex": "a"})
