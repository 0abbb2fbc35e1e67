"""Calls written as tags, as Qwen3-Coder does: held to their schema, read as JSON, shown by the
official client over a real socket."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from martlet.server.tool_tags import TagArguments, text_rules, types_of

from .babbling import babbling
from .serving import assert_refused, chat_body, serving
from .tool_cases import MESSAGES, NOTE_ARGS, PATH, WEATHER_ARGS, official, scripted, streamed, tool

# As Qwen3-Coder's template does it, in short.
TAGS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FILE_ARGS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
    "required": ["path", "mode"],
    "additionalProperties": False,
}
TOOLS = [tool("file", FILE_ARGS), tool("weather", WEATHER_ARGS), tool("note", NOTE_ARGS)]
CODE = 'if a < b and "c":\n\treturn </x>\n'


def called(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


TWO = (
    "Let me see.\n"
    + called("file", path=CODE, mode="w", lines="[1, 2]", note="null", deep='{"x": true}')
    + "\n"
    + called("weather", city="Rome", days="3")
)
WRITTEN = [
    {"path": CODE, "mode": "w", "lines": [1, 2], "note": None, "deep": {"x": True}},
    {"city": "Rome", "days": 3},
]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_whole_and_streamed(choice: str) -> None:
    text = TWO if choice == "auto" else TWO.removeprefix("Let me see.\n")
    with official(scripted(text, TAGS)) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice
        )
        last, deltas = streamed(client, tools=TOOLS, tool_choice=choice)
    for found in (whole.choices[0], last):
        assert found.finish_reason == "tool_calls"
        assert (found.message.content or "") == ("Let me see." if choice == "auto" else "")
        calls = found.message.tool_calls or []
        assert [call.function.name for call in calls] == ["file", "weather"]
        assert [json.loads(call.function.arguments) for call in calls] == WRITTEN
    pieces = [piece for delta in deltas for piece in delta.tool_calls or [] if piece.index == 0]
    assert len(pieces) > 20  # text comes as it is written


def test_what_does_not_fit_the_schema_may_not_be_said() -> None:
    for bad in (
        called("file", path="x"),
        called("file", path="x", mode="a"),
        called("weather", city="Rome", days="10"),
        called("file", path="x", mode="r", lines="[1,2,3,4]"),
        called("other"),
    ):
        with serving(scripted(bad, TAGS)) as client:
            assert client.post(PATH, json=chat_body(tools=TOOLS)).status_code == 500


def test_whatever_the_model_wants_the_arguments_fit() -> None:
    schemas: dict[str, Any] = {"file": FILE_ARGS, "weather": WEATHER_ARGS, "note": NOTE_ARGS}
    for_babbling = [tool("weather", WEATHER_ARGS), tool("note", NOTE_ARGS)]
    with babbling(TAGS) as http:
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0)
        for seed in range(3):
            choice = client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                tools=for_babbling,
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
            ).choices[0]
            [call] = choice.message.tool_calls or []
            assert choice.finish_reason == "tool_calls"
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": "string", "minLength": "x"}}},
        {"properties": {"a": {"type": "string", "maxLength": -1}}},
        {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
        {"required": 5},
        {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}},
    ],
)
def test_a_schema_that_is_none_is_refused_by_its_place(schema: Any) -> None:
    with serving(scripted("ok", TAGS)) as client:
        body = chat_body(tools=[tool("f", schema)])
        error = assert_refused(client.post(PATH, json=body))
    assert error["param"] == "tools[0].function.parameters"


def test_a_count_that_is_none_never_reaches_the_grammar() -> None:
    """No schema check reads minLength of an integer; as text it could end the rule it is in."""
    odd = {"type": "integer", "minLength": '0,1}|(a"', "maxLength": True}
    assert text_rules({"f": {"properties": {"n": odd}}}) == text_rules(
        {"f": {"properties": {"n": {}}}}
    )


def test_calls_of_the_history_are_the_templates() -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "a", "type": "function", "function": call}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    engine = scripted("ok", TAGS)
    with serving(engine) as client:
        answer = client.post(PATH, json=chat_body(messages=messages, tools=TOOLS))
        assert answer.status_code == 200, answer.text
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
    assert "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>" in prompt


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/s"}]}, {"integer", "string"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"s": {"type": "string"}, "r": {"$ref": "#/$defs/r"}}}
    assert types_of(schema, root) == types
    for unknown in ({}, True, {"$ref": "#/$defs/r"}, {"$ref": "#/gone"}, {"allOf": []}):
        assert len(types_of(unknown, root)) == 7


def test_choices_of_itself_are_followed_once() -> None:
    """Each of them each time would be 30 ^ 8 steps."""
    root = {"$defs": {"a": {"anyOf": [*[{"$ref": "#/$defs/a"}] * 30, {"type": "string"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == {"string"}


def read(text: str, schema: Any = None) -> str:
    written, rest, is_whole = TagArguments(schema).feed(text + "</function>")
    assert (rest, is_whole) == ("", True)
    return "{" + written


def test_values_of_unknown_types_are_told_by_their_looks() -> None:
    text = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("a", "5"), ("b", "five"), ("c", '["x"]'), ("d", '"q"'), ("e", ""))
    )
    assert json.loads(read(text)) == {"a": 5, "b": "five", "c": ["x"], "d": '"q"', "e": ""}


def test_what_may_only_be_text_is_text() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": ["string", "null"]}}}
    text = "<parameter=a>5</parameter><parameter=b>\n5\n</parameter>\n"
    assert json.loads(read(text, schema)) == {"a": "5", "b": "5"}
