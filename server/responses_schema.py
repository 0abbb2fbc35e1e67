"""What requests to /v1/responses may say, and which of their fields are not obeyed.

Owns: the request's model, its items as templates read them. Must not know: templates, the engine,
HTTP. Nothing is stored: each request brings its whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from .asking import MAX_TOP_LOGPROBS, Fields, Positive, Strict
from .fields import MEDIA, NO_EFFECT, REFUSED, FieldRules, Refused
from .form_fields import FORM_FIELDS, TextFormat
from .reasoning import Effort
from .schema import Sampled
from .structured import Form
from .tool_fields import FlatToolFields

STATELESS = "nothing is stored here; send the whole conversation as input"

HONOURED_HERE = ("reasoning", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls")

REQUEST = FieldRules(
    refused={
        **{name: rule for name, rule in REFUSED.items() if name not in HONOURED_HERE},
        "previous_response_id": Refused(STATELESS),
        "conversation": Refused(STATELESS),
        "store": Refused("nothing is stored here; leave it out or send false", (False,)),
        "background": Refused("the answer is made while the client waits", (False,)),
        "prompt": Refused("prompts are not stored here; use instructions and input"),
        "truncation": Refused("an input that is too long is refused, never cut", ("disabled",)),
        "context_management": Refused("an input is never cut or compacted"),
        "messages": Refused("use input"),
        "max_tokens": Refused("use max_output_tokens"),
        "max_completion_tokens": Refused("use max_output_tokens"),
        "n": Refused("one answer per request", (1,)),
        "logprobs": Refused("use top_logprobs", (False,)),
        **dict.fromkeys(FORM_FIELDS, Refused("use text.format")),
        "response_format": Refused("use text.format", ({"type": "text"},)),
        "verbosity": Refused("use text.verbosity"),
        "reasoning_effort": Refused("use reasoning.effort"),
    },
    # Counts calls of tools that a server runs itself, of which there are none.
    no_effect=NO_EFFECT - {"store"} | {"max_tool_calls"},
)


class Text(Fields):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={
            "verbosity": REFUSED["verbosity"],
        }
    )

    format: TextFormat | None = None


SUMMARY = Refused("reasoning is shown whole, without a summary", ("auto",))


class Reasoning(Fields):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={"summary": SUMMARY, "generate_summary": SUMMARY}
    )

    effort: Effort | None = None


class StreamOptions(Fields):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={"include_obfuscation": Refused("nothing is padded here", (False,))}
    )


class Piece(Strict):
    type: str
    text: str


PIECES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _pieces(value: Any) -> Any:
    """Content in any allowed form as a list of pieces."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(piece, dict) for piece in value):
        raise ValueError("must be a string or a list of parts")
    _check_types(value, PIECES, f"parts of this type are not supported; {MEDIA}")
    return value


def _items(value: Any) -> Any:
    """Input in any allowed form as a list of items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a string or a list of items")
    _check_types(value, (*ITEMS, None), "items of this type are not supported")
    return value


def _check_types(objects: list[dict[str, Any]], known: tuple[str | None, ...], why: str) -> None:
    for given in objects:
        kind = given.get("type")
        if kind not in known:
            raise ValueError(f"{kind[:40] if isinstance(kind, str) else 'no type'}: {why}")


Pieces = Annotated[list[Piece], BeforeValidator(_pieces, json_schema_input_type=str | list[Piece])]


NEEDED = {"function_call": ("call_id", "name"), "function_call_output": ("call_id",)}
"""What else an item of a type cannot do without."""


class Item(Strict):
    """One step of a conversation; which fields count depends on the type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Pieces | None = None
    summary: Pieces | None = None
    output: Pieces = Field(default_factory=list)
    call_id: str | None = None
    name: str = ""
    arguments: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Item:
        for name in NEEDED.get(self.type, ()):
            if not getattr(self, name):
                raise ValueError(f"{name}: a {self.type} needs it")
        return self


class ResponsesRequest(Sampled, FlatToolFields):
    RULES: ClassVar[FieldRules] = REQUEST
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {
        "text": Text,
        "reasoning": Reasoning,
        "stream_options": StreamOptions,
    }

    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_output_tokens: Positive | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    text: Text = Text()
    reasoning: Reasoning = Reasoning()
    # Reasoning comes back in plain text, so encrypted text adds nothing to it.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def n_logprobs(self) -> int | None:
        has_any = self.top_logprobs or "message.output_text.logprobs" in self.include
        return (self.top_logprobs or 0) if has_any else None

    @property
    def form(self) -> Form | None:
        return self.text.format.form("text.format") if self.text.format else None

    @property
    def limits(self) -> list[int | None]:
        return [self.max_output_tokens]

    def for_template(self) -> list[dict[str, Any]]:
        """As templates expect it: reasoning and calls belong to a message of the assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        thoughts = ""
        for item in self.input:
            if item.type == "reasoning":
                thoughts = _joined(item.content or item.summary)
                continue
            before = messages[-1] if messages else {}
            if item.type == "function_call" and before.get("role") == "assistant" and not thoughts:
                before.setdefault("tool_calls", []).append(_call(item))
                continue
            messages.append(_message(item))
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
        return messages


def _message(item: Item) -> dict[str, Any]:
    if item.type == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(item)]}
    if item.type == "function_call_output":
        return {"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id}
    return {"role": item.role, "content": _joined(item.content)}


def _call(item: Item) -> dict[str, Any]:
    return {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}


def _joined(pieces: list[Piece] | None) -> str:
    return "".join(piece.text for piece in pieces or [])
