"""Messages to token ids, by the model's own chat template.

Owns: ChatTemplate (compiled once per model), what a template sees of a message, and the rule that
a user's text never becomes a control token: markup is encoded with specials, content without.
Must not know: HTTP, the engine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from ..runtime.errors import RequestError
from ..runtime.tokenizer import Tokenizer
from .content import Marks, Piece, mark, split_marked
from .reasoning import OPEN, ThinkingWords
from .sandbox import (
    BUDGET_KEY,
    MAX_SOURCE_CHARS,
    Budget,
    ChatTemplateError,
    LimitedSandbox,
    Refusal,
)
from .tool_formats import format_of

RENDER_LIMIT_S = 5.0
# Message keys whose values the server has checked against its own list, so they may be markup.
OWN_WORDS = frozenset({"role", "type"})

Message = Mapping[str, Any]


class ChatPrompt(NamedTuple):
    ids: list[int]
    opens_reasoning: bool
    """The prompt ends within a think tag, so the answer begins inside."""


class ChatTemplate:
    """A compiled template with the tokenizer whose ids it leads to."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"chat template has {len(source)} characters, limit is {MAX_SOURCE_CHARS}"
            )
        self._tokenizer = tokenizer
        self._limit_s = limit_s
        self.source = source
        self.thinking = ThinkingWords.of(source)
        self.tool_format = format_of(source)
        try:
            self._template = LimitedSandbox().from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"chat template has a syntax error in line {error.lineno}: {error.message}; "
                "start with a corrected template file"
            ) from error
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"chat template does not compile: {error!r:.200}") from error

    def encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Prompt ids, with exactly one BOS if the template or the model asks for it, else none."""
        return self.prompt(messages, add_generation_prompt=add_generation_prompt, **kwargs).ids

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
        **kwargs: Any,
    ) -> ChatPrompt:
        """continues: the answer goes on with the last message instead of beginning a new one."""
        adds = add_generation_prompt and not continues
        pieces = self.render(messages, add_generation_prompt=adds, **kwargs)
        if continues:
            while pieces and not pieces[-1].is_content:
                pieces.pop()
        opens = (
            bool(pieces) and not pieces[-1].is_content and pieces[-1].text.rstrip().endswith(OPEN)
        )
        # Special tokens are sought in markup only; plain text merges across the seams.
        ids = self._tokenizer.with_single_bos(self._tokenizer.encode_parts(pieces))
        return ChatPrompt(ids, opens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Piece]:
        """Rendered text, split into markup and content. Raises RequestError on a refusal."""
        marks = Marks.fresh()
        values = {
            "messages": [template_message(message, marks) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": _special_text(self._tokenizer, self._tokenizer.bos_id),
            "eos_token": _special_text(self._tokenizer, self._tokenizer.eos_id),
            "tools": mark([*tools], marks) if tools else None,
            **kwargs,
            BUDGET_KEY: Budget(self._limit_s),
        }
        try:
            return split_marked(self._template.render(values), marks)
        except Refusal as error:
            raise RequestError(marks.strip(str(error)), field="messages") from error
        except Exception as error:
            # A stranger's template can raise anything; the request is what it could not handle.
            reason = marks.strip(str(error)) or type(error).__name__
            raise RequestError(
                f"the model's chat template failed on these messages: {reason:.300}",
                field="messages",
            ) from error


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> list[int]:
    """Prompt ids of one conversation: ChatTemplate for callers who need it once."""
    return ChatTemplate(template, tokenizer).encode(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
    )


def template_message(message: Message, marks: Marks) -> dict[str, Any]:
    """A message as templates expect it: content a string, absent keys absent, never None."""
    shown: dict[str, Any] = {"content": ""}
    for key, value in message.items():
        if value is not None and value != []:
            shown[key] = value if key in OWN_WORDS else _marked_field(key, value, marks)
    if shown.get("role") == "developer":
        shown["role"] = "system"
    return shown


def _marked_field(key: str, value: Any, marks: Marks) -> Any:
    if key == "content" and not isinstance(value, str):
        return mark("".join(part["text"] for part in value), marks)
    if key == "tool_calls":
        return [_tool_call(call, marks) for call in value]
    return mark(value, marks)


def _tool_call(call: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # The API carries arguments as JSON text, templates print them with tojson.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    shown = {"name": mark(function["name"], marks), "arguments": mark(arguments, marks)}
    return {"type": "function", "id": mark(call.get("id") or "", marks), "function": shown}


def _special_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.decode([token_id], special=True)
