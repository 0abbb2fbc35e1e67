"""Tool calls read out of text, however it is cut; and what is no call stays text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.server.parts import CallPiece
from martlet.server.tool_formats import FORMATS, GENERIC, HERMES, LLAMA, ToolFormat, format_of
from martlet.server.tool_reader import CallReader

BY_NAME = {form.name: form for form in FORMATS}
NAMED, MISTRAL = BY_NAME["mistral, named"], BY_NAME["mistral"]
GRANITE, PHI, TAGS = BY_NAME["granite"], BY_NAME["phi"], BY_NAME["tags"]
NAMES = ("look", "add")
Call = tuple[str, str]


def read(pieces: list[str], form: ToolFormat = HERMES) -> tuple[str, list[Call]]:
    """The text and the calls (name, arguments); asserts what every client relies on."""
    reader = CallReader(form, NAMES, SCHEMAS)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    text, calls, ids = "", [], []
    for is_reasoning, piece in parts:
        assert not is_reasoning
        if not isinstance(piece, CallPiece):
            assert piece
            text += piece
        elif piece.name:
            assert piece.nth == len(calls)
            assert piece.arguments == ""
            calls.append((piece.name, ""))
            ids.append(piece.id)
        else:
            assert piece.nth == len(calls) - 1
            assert piece.arguments
            assert piece.id == ""
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) == form.id_chars for call_id in ids)
    return text, calls


LOOK = '{"name": "look", "arguments": {"at": "a } \\" ] b"}}'
ADD = '{"name":"add","arguments":{"n":[1,{"m":2}]}}'
LOOKED, ADDED = ("look", '{"at": "a } \\" ] b"}'), ("add", '{"n":[1,{"m":2}]}')
T = (
    "<function=look>\n<parameter=at>\na } b\n<x>\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>"
)
T_JSON = '{"at": "a } b\\n<x>", "n": 3}'
NONE = "<function=add>\n</function>"
SCHEMAS = {"look": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}}
H = "<tool_call>\n{}\n</tool_call>"

CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "just text ", "just text ", []),
    (HERMES, H.format(LOOK), "", [LOOKED]),
    (HERMES, "Let me see.\n\n" + H.format(LOOK), "Let me see.", [LOOKED]),
    (HERMES, H.format(LOOK) + "\n" + H.format(ADD) + "\n", "", [LOOKED, ADDED]),
    (HERMES, H.format(LOOK) + "and then", "and then", [LOOKED]),
    (HERMES, f"<tool_call>{LOOK}</tool_call><tool_call>{ADD}</tool_call>", "", [LOOKED, ADDED]),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>\nnothing", "<tool_call>\nnothing", []),
    (HERMES, H.format('{"name": "other", "arguments": {}}'), "as it is", []),
    (HERMES, H.format('{"arguments": {"at": 1}, "name": "look"}'), "", [("look", '{"at": 1}')]),
    (
        HERMES,
        H.format('{"name": "look", "arguments": "{\\"at\\": 1}"}'),
        "",
        [("look", '{"at": 1}')],
    ),
    (HERMES, H.format('{"name": "look"}'), "", [("look", "{}")]),
    (HERMES, '<tool_call>{"name": "look", "argum', "as it is", []),
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "x', "", [("look", '{"at": "x')]),
    (LLAMA, "The answer is { 4 }.", "The answer is { 4 }.", []),
    (LLAMA, '{"name": "look", "parameters": {"at": 1}}', "", [("look", '{"at": 1}')]),
    (LLAMA, ' <|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
    (LLAMA, '{"city": "Rome", "name": "look"}', '{"city": "Rome", "name": "look"}', []),
    (LLAMA, '{"name": "Rome", "parameters": {}}', '{"name": "Rome", "parameters": {}}', []),
    (LLAMA, '{"na', '{"na', []),
    (LLAMA, "  ", "  ", []),
    (MISTRAL, f"[TOOL_CALLS] [{LOOK}, {ADD}]", "", [LOOKED, ADDED]),
    (MISTRAL, f"[TOOL_CALLS][{ADD}]", "", [ADDED]),
    (MISTRAL, f'[TOOL_CALLS][{ADD[:-1]}, "id": "abc"}}]', "", [ADDED]),
    (MISTRAL, f"Well: [TOOL_CALLS] [{ADD}", "Well:", [ADDED]),
    (NAMED, '[TOOL_CALLS]look[ARGS]{"at": 1}', "", [("look", '{"at": 1}')]),
    (
        NAMED,
        f"[TOOL_CALLS]look[ARGS]{{}}[TOOL_CALLS]add[ARGS]{ADDED[1]}",
        "",
        [("look", "{}"), ADDED],
    ),
    (GRANITE, f"<|tool_call|>[{LOOK}, {ADD}]", "", [LOOKED, ADDED]),
    (GRANITE, f"So. <|tool_call|> [{ADD}] and", "So.and", [ADDED]),
    (PHI, f"<|tool_call|>[{LOOK}, {ADD}]<|/tool_call|>", "", [LOOKED, ADDED]),
    (PHI, f"<|tool_call|>{ADD}<|/tool_call|>", "", [ADDED]),
    (PHI, f"<|tool_call|>[{ADD}] <|/tool_call|> </x>", "</x>", [ADDED]),
    (PHI, f"<|tool_call|>[{ADD}] <|/tool", "", [ADDED]),
    (TAGS, H.format(T), "", [("look", T_JSON)]),
    (TAGS, "So.\n" + H.format(T) + "\n" + H.format(NONE), "So.", [("look", T_JSON), ("add", "{}")]),
    (TAGS, H.format("<function=other>\n</function>"), "as it is", []),
    (TAGS, "<tool_call>\n<fun", "as it is", []),
    (TAGS, "<tool_call>\n<fun fact>", "as it is", []),
    (TAGS, "<tool_call><function=look><parameter=at>x</par", "", [("look", '{"at": "x')]),
    (GENERIC, "yes " + H.format(ADD), "yes", [ADDED]),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_and_text_however_it_is_cut(
    form: ToolFormat, text: str, shown: str, calls: list[Call]
) -> None:
    expected = (text if shown == "as it is" else shown, calls)
    assert read([text], form) == expected
    assert read(list(text), form) == expected
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], form) == expected


WORDS = [
    "<tool_call>",
    "</tool_call>",
    LOOK,
    ADD,
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function=look>",
    "<parameter=at>",
    "</parameter>",
    "</function>",
    "look",
    "{",
    "}",
    " a",
    "\n",
]
WORDS += ['"', "<", "[", "]", ",", '{"name": "add", "parameters": {}}', "<|python_tag|>", "\\"]


@given(
    st.lists(st.sampled_from(WORDS), max_size=12),
    st.sampled_from([HERMES, LLAMA, MISTRAL, NAMED, GRANITE, PHI, TAGS]),
)
def test_cutting_changes_nothing(pieces: list[str], form: ToolFormat) -> None:
    whole = read(["".join(pieces)], form)
    assert read(pieces, form) == whole
    assert read(list("".join(pieces)), form) == whole


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "look", "arguments": ') == []
    ((_, first), (_, second)) = reader.push('{"at":')
    assert isinstance(first, CallPiece)
    assert (first.name, second) == ("look", CallPiece(0, "", "", '{"at":'))
    assert reader.push(' "x') == [(False, CallPiece(0, "", "", ' "x'))]
    assert reader.push('"}') == [(False, CallPiece(0, "", "", '"}'))]
    assert reader.push("}\n</tool_call>") == []


def test_text_is_held_back_only_where_a_call_may_begin() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push("so ") == [(False, "so")]
    assert reader.push("far") == [(False, " far")]
    assert reader.push("<to") == []
    assert reader.push("p>") == [(False, "<top>")]
    free = CallReader(LLAMA, NAMES)
    assert free.push('{"city"') == [(False, '{"city"')]
    assert free.push(": 1") == [(False, ": 1")]


@pytest.mark.parametrize(
    ("form", "start"),
    [
        (HERMES, ""),
        (HERMES, '<tool_call>{"id": ['),
        (LLAMA, '{"name": ["'),
        (MISTRAL, '[TOOL_CALLS][{"type": ['),
    ],
)
def test_long_text_costs_no_more_per_token(form: ToolFormat, start: str) -> None:
    reader, begun = CallReader(form, NAMES), time.process_time()
    reader.push(start)
    for _ in range(40_000):
        reader.push('1, "a",')
    reader.finish()
    assert time.process_time() - begun < 10  # quadratic: minutes


def test_formats_are_chosen_by_what_the_template_says() -> None:
    said: Any = {
        "{{ '[TOOL_CALLS]' }}": "mistral",
        "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}": "mistral, named",
        "<tool_call>\n{{ tool_call | tojson }}\n</tool_call>": "hermes",
        "<tool_call>\n<function=x>\n<parameter=y>": "tags",
        'Respond in the format {"name": function name, "parameters": dictionary}': "llama",
        "{{ messages }}": "generic",
        "<|start_of_role|> followed by <|tool_call|>": "granite",
        "<|start_of_role|> <tool_call></tool_call>": "hermes",
        "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}": "phi",
    }
    assert {source: format_of(source).name for source in said} == said
    assert format_of("{{ messages }}").shown == "system text"
    assert format_of("<tool_call>").shown == "template"


def test_ids_are_such_as_templates_accept() -> None:
    reader = CallReader(MISTRAL, NAMES)
    [(_, piece), _] = reader.push(f"[TOOL_CALLS][{ADD}]")
    assert isinstance(piece, CallPiece)
    assert piece.id.isalnum()
    assert len(piece.id) == 9
    assert json.loads(ADDED[1])
