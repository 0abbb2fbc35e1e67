"""What tests of tools share: templates, two functions, calls of them, the official client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import openai

from .scripted_engine import CHATML, ScriptedEngine, byte_tokenizer, says
from .serving import serving

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
# As Qwen's template does it, in short.
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_HERMES = HERMES + "{# </think> #}"
LLAMA = CHATML + '{# Respond in the format {"name": function name, "parameters": … } #}'
MISTRAL = CHATML + "{# [TOOL_CALLS] #}"
WEATHER_ARGS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE_ARGS = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 9}}}


def tool(name: str, parameters: Any = None, **rest: Any) -> Any:
    function = {"name": name, **rest, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("weather", WEATHER_ARGS, description="Of a city.")
NOTE = tool("note", NOTE_ARGS)
TOOLS = [WEATHER, NOTE]
ROME, TEXT = '{"city": "Rome", "days": 3}', '{"text": "a } b"}'


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def scripted(text: str, template: str = HERMES) -> ScriptedEngine:
    return ScriptedEngine(says(text), tokenizer=byte_tokenizer(template))


@contextlib.contextmanager
def official(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with serving(engine) as client:
        yield openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """What the client's own accumulator makes of the chunks, and their deltas."""
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, **fields) as stream:
        deltas = [e.chunk.choices[0].delta for e in stream if e.type == "chunk" and e.chunk.choices]
        return stream.get_final_completion().choices[0], deltas
