"""Conversations with tools for templates that show less of them than models were trained with.

Owns: where tools are told, how calls and results of the history are written. Must not know: how
calls are read, requests, dialects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .tool_formats import ToolFormat

Json = dict[str, Any]

TELLING = """\
You may call these functions. Each is a JSON object with its name, what it does, and the JSON
schema of its parameters:

{functions}

To call one, answer with this and nothing after it, once for each call:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>
What it returns comes back between <tool_response> tags."""


def told(messages: Sequence[Json], functions: Sequence[Json], form: ToolFormat) -> list[Json]:
    """The conversation as the template has to see it. functions: each with its name, and
    description and parameters where it has them."""
    said = [_as_text(message, form) for message in messages]
    if form.shown == "template":
        return said
    has_system = said and said[0]["role"] in ("system", "developer")
    first, rest = (said[0], said[1:]) if has_system else ({"role": "system", "content": ""}, said)
    written = [json.dumps(function, ensure_ascii=False) for function in functions]
    if form.shown == "system tools":
        return [{**first, "role": "system", "tools": f"[{', '.join(written)}]"}, *rest]
    text = TELLING.format(functions="\n".join(written))
    return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}".strip()}, *rest]


def _as_text(message: Json, form: ToolFormat) -> Json:
    if form.keeps_calls:
        return message
    if message["role"] == "tool":
        return _result(message, form)
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_call(call["function"], form) for call in calls]
    if form.shape == "list":
        texts = [f"{form.begin}[{', '.join(written)}]{form.end}"]
    else:
        texts = [f"{form.begin}\n{call}\n{form.end}" for call in written]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = "\n".join(filter(None, (_text(message.get("content")), *texts)))
    return {**rest, "content": content}


def _result(message: Json, form: ToolFormat) -> Json:
    content = _text(message.get("content"))
    if form.shown != "system text":
        return {**message, "role": form.result_role, "content": content}
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


def _call(function: Json, form: ToolFormat) -> str:
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "{form.arguments_key}": {arguments}}}'


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
