"""How models write tool calls: one table, chosen from by what a chat template's source says.

Owns: ToolFormat, FORMATS, the grammar of calls in each format. Must not know: requests, dialects,
how written calls are read back (tool_reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..runtime.grammar import json_value, literal

Json = dict[str, Any]
Marker = Callable[[str], str]
"""A marker's text as Lark: a control token where the vocabulary has one, else the text."""

SPACE = "SPACE: /[ \\n]{1,4}/\n"


class ToolFormat(NamedTuple):
    """How calls of one model family look. A call is an object with a name and arguments, unless
    its name stands before it."""

    name: str
    signs: tuple[str, ...]
    """All of them stand in the template's source."""
    shape: Literal["object", "list", "named"]
    begin: str
    """Before each call, or before the list of them; "": the answer itself is a call."""
    end: str = ""
    arguments_key: str = "arguments"
    between: str = ""
    """Of shape "named": between the name and its arguments."""
    id_chars: int = 24
    tells: bool = False
    """The template does not show tools, so a system message has to."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.between)))


HERMES = ToolFormat("hermes", ("<tool_call>",), "object", "<tool_call>", "</tool_call>")
GENERIC = HERMES._replace(name="generic", signs=(), tells=True)
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
    # Calls as XML, which nothing here reads: such a model is told of the generic form instead.
    GENERIC._replace(signs=("<tool_call>", "<function=")),
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
    if form.shape == "list":
        more = '(SPACE? "," SPACE? call)* ' if several else ""
        body, repeat = f'SPACE? "[" SPACE? call {more}SPACE? "]"', ""
    else:
        end = f"SPACE? {marker(form.end)}" if form.end else ""
        body = f"SPACE? call {end}" if form.begin else "call"
        repeat = f"(SPACE? {begin} body)*" if several and begin else ""
    return f"calls: {begin} tail\ntail: body {repeat}\nbody: {body}\ncall: {one}\n{SPACE}"


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


# ---- for models whose template shows no tools ----------------------------------------------------

TELLING = """\
You may call these functions. Each is a JSON object with its name, what it does, and the JSON
schema of its parameters:

{functions}

To call one, answer with this and nothing after it, once for each call:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>
What it returns comes back between <tool_response> tags."""


def told(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """The conversation with the tools in its system message, and calls and results as text."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    said = [_as_text(message) for message in messages]
    text = TELLING.format(functions=functions)
    if said and said[0]["role"] in ("system", "developer"):
        first = {**said[0], "content": f"{_text(said[0].get('content'))}\n\n{text}".strip()}
        return [first, *said[1:]]
    return [{"role": "system", "content": text}, *said]


def _as_text(message: Json) -> Json:
    if message["role"] == "tool":
        content = _text(message.get("content"))
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [_text(message.get("content"))]
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        texts.append(f"<tool_call>\n{head}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, texts))}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
