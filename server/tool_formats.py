"""How models write tool calls: one table, chosen from by what a chat template's source says.

Owns: ToolFormat, FORMATS, the grammar of calls in each format. Must not know: requests, dialects,
how written calls are read back (tool_reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ..runtime.grammar import json_value, literal
from .tool_tags import call_term, text_rules

Json = dict[str, Any]
Marker = Callable[[str], str]
"""A marker's text as Lark: a control token where the vocabulary has one, else the text."""

SPACE = "SPACE: /[ \\n]{1,4}/\n"


class ToolFormat(NamedTuple):
    """How calls of one model family look. A call is an object with a name and arguments, unless
    its name stands before it, or it is written as tags (tool_tags.py)."""

    name: str
    signs: tuple[str, ...]
    """All of them stand in the template's source."""
    shape: Literal["object", "list", "named", "tagged"]
    begin: str
    """Before each call, or before the list of them; "": the answer itself is a call."""
    end: str = ""
    arguments_key: str = "arguments"
    between: str = ""
    """Of shape "named": between the name and its arguments."""
    id_chars: int = 24
    shown: Literal["template", "system text", "system tools"] = "template"
    """Who shows the tools: the template, the text of a system message, or the template from what a
    system message has as `tools`."""
    keeps_calls: bool = True
    """The template writes calls of the history; else they are text."""
    result_role: str = "tool"

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.between)))


HERMES = ToolFormat("hermes", ("<tool_call>",), "object", "<tool_call>", "</tool_call>")
GENERIC = HERMES._replace(name="generic", signs=(), shown="system text", keeps_calls=False)
LLAMA = ToolFormat(
    "llama",
    ('"name": function name, "parameters"',),
    "object",
    "",
    arguments_key="parameters",
)
FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "mistral, named",
        ("[TOOL_CALLS]", "[ARGS]"),
        "named",
        "[TOOL_CALLS]",
        between="[ARGS]",
        id_chars=9,
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "list", "[TOOL_CALLS]", id_chars=9),
    # Granite up to 3.3, by its own template; 4 writes as Hermes does.
    ToolFormat(
        "granite",
        ("<|start_of_role|>", "<|tool_call|>"),
        "list",
        "<|tool_call|>",
        keeps_calls=False,
    ),
    # Phi-4-mini, by its tokenizer's control tokens.
    ToolFormat(
        "phi",
        ("<|tool|>", "<|/tool|>", "message['tools']"),
        "list",
        "<|tool_call|>",
        "<|/tool_call|>",
        shown="system tools",
        keeps_calls=False,
        result_role="tool_response",
    ),
    # Qwen3-Coder, Qwen3.5 and others that write as they do.
    ToolFormat(
        "tags",
        ("<tool_call>", "<function=", "<parameter="),
        "tagged",
        "<tool_call>",
        "</tool_call>",
    ),
    HERMES,
    LLAMA,
    GENERIC,
)


def format_of(template: str) -> ToolFormat:
    return next(f for f in FORMATS if all(sign in template for sign in f.signs))


def call_rules(tools: Mapping[str, Any], form: ToolFormat, marker: Marker, *, several: bool) -> str:
    """Lark for `calls` (one, or several), and for what follows the first `begin` as `body`.

    tools: the schema of each one's arguments.
    """
    one = " | ".join(_call(name, schema, form, marker) for name, schema in tools.items())
    begin = marker(form.begin) if form.begin else ""
    end = f"SPACE? {marker(form.end)}" if form.end else ""
    if form.shape == "list":
        more = '(SPACE? "," SPACE? call)* ' if several else ""
        body, repeat = f'SPACE? "[" SPACE? call {more}SPACE? "]" {end}', ""
    else:
        body = f"SPACE? call {end}" if form.begin else "call"
        repeat = f"(SPACE? {begin} body)*" if several and begin else ""
    texts = text_rules(tools) if form.shape == "tagged" else ""
    return f"calls: {begin} tail\ntail: body {repeat}\nbody: {body}\ncall: {one}\n{texts}{SPACE}"


def free_until_calls(form: ToolFormat, marker: Marker, *, may_think: bool) -> str:
    """Lark for `answer`: text, and calls that are held to their form from the marker on."""
    begin = marker(form.begin)
    if begin.startswith("<["):  # no text holds a control token
        return f"answer: TEXT? | TEXT? {begin} tail\nTEXT: /(.|\\n)+/\n"
    pattern = json.dumps(form.begin)
    # A marker within the reasoning is none; the reasoning has a rule of its own.
    no_reasoning = " & ~/[ \\n]*<think>(.|\\n)*/" if may_think else ""
    return (
        "answer: TEXT? | lead tail\nlead[lazy]: UNTIL\n"
        f"UNTIL: (/(.|\\n)*/ {pattern}){no_reasoning}\nTEXT: /(.|\\n)+/\n"
    )


def _call(name: str, schema: Any, form: ToolFormat, marker: Marker) -> str:
    if form.shape == "tagged":
        return call_term(name, schema)
    if form.shape == "named":
        return f"{literal(name)} {marker(form.between)} {json_value(schema)}"
    return json_value(
        {
            "type": "object",
            "properties": {"name": {"const": name}, form.arguments_key: schema},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
    )
