"""What requests in Anthropic's dialect may say, and which of their fields are not obeyed.

Owns: the models of /v1/messages and its count_tokens, their messages as templates read them. Must
not know: templates, the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..runtime.sampling_params import SamplingParams
from .asking import MAX_NAME_CHARS, MAX_SEED, Asked, Count, Fields, Number, Positive, Strict, stops
from .errors import refused
from .fields import MEDIA, FieldRules, Refused
from .structured import Form
from .tools import MAX_TOOLS, ToolUse, offered

BETWEEN_BLOCKS = "\n\n"

REQUEST = FieldRules(
    refused={
        "mcp_servers": Refused("the server reaches no network", ([],)),
        "container": Refused("there are no containers here"),
        "context_management": Refused("messages are never cut or cleared"),
        "output_format": Refused("use output_config.format"),
        "diagnostics": Refused("use timings on the OpenAI routes"),
        "inference_geo": Refused("it all happens on this machine"),
        "speed": Refused("there is one speed", ("standard",)),
        "prompt": Refused("use messages"),
        "max_completion_tokens": Refused("use max_tokens"),
        "max_tokens_to_sample": Refused("use max_tokens"),
        "stop": Refused("use stop_sequences"),
        "n": Refused("one answer per request", (1,)),
    },
    no_effect=frozenset(
        {
            "cache_control",  # the prefix cache never changes an answer, so it is simply on
            "metadata",
            "service_tier",  # there is one
            "user_profile_id",
            "workspace_id",
        }
    ),
)


class Thinking(Fields):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={
            "budget_tokens": Refused("a budget is not enforced; use type: adaptive without one"),
            "display": Refused("thinking is shown as it is", ("summarized",)),
        }
    )

    type: Literal["enabled", "adaptive", "disabled"]


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={
            "effort": Refused("use thinking", ("high",)),
        }
    )

    format: JsonFormat | None = None


class Block(Strict):
    """A part of a message; those of other types are refused by name."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str | None = None
    content: Annotated[
        list[Block],
        BeforeValidator(
            lambda value: _blocks(value), json_schema_input_type=str | list[dict[str, Any]]
        ),
    ] = Field(default_factory=list)


BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")


def _blocks(value: Any) -> Any:
    """Content in any allowed form as a list of blocks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise ValueError("must be a string or a list of blocks")
    for block in value:
        if block.get("type") not in BLOCK_TYPES:
            kind = block.get("type")
            shown = kind[:40] if isinstance(kind, str) else "none"
            raise ValueError(f"blocks of type {shown} are not supported; {MEDIA}")
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            raise ValueError("a text block needs a string text")
    return value


Blocks = Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant"]
    content: Blocks


class AnthropicTool(Strict):
    """A function of the client's; tools that the server would run are refused by type."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def function(self) -> dict[str, Any]:
        given = {"description": self.description, "parameters": self.input_schema}
        return {"name": self.name, **{key: value for key, value in given.items() if value}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


MODES: Mapping[str, Literal["auto", "required", "named"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
}


class Conversation(Asked):
    """What is said so far: all that counting tokens needs."""

    RULES: ClassVar[FieldRules] = REQUEST
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {
        "thinking": Thinking,
        "output_config": OutputConfig,
    }

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: Blocks = Field(default_factory=list)
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = ToolChoice(type="auto")

    @property
    def tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        if (choice.type == "tool") != (choice.name is not None):
            raise refused("tool_choice: a name belongs to type tool", param="tool_choice")
        if choice.type in ("any", "tool") and not self.tools:
            raise refused("tool_choice: there are no tools", param="tool_choice")
        if choice.type == "none":
            return None
        return offered(
            [tool.function for tool in self.tools],
            mode=MODES[choice.type],
            names=[choice.name] if choice.name else [],
            several=not choice.disable_parallel_tool_use,
            place="tools[{}]",
            schema="input_schema",
        )

    def for_template(self) -> list[dict[str, Any]]:
        """As templates expect it: turns of one role together, tool results as their own."""
        messages: list[dict[str, Any]] = []
        if system := _joined(self.system):
            messages.append({"role": "system", "content": system})
        for message in self.messages:
            for said in _said(message):
                if messages and _is_same_turn(messages[-1], said):
                    both = (messages[-1]["content"], said["content"])
                    messages[-1]["content"] = BETWEEN_BLOCKS.join(filter(None, both))
                else:
                    messages.append(said)
        return messages


class MessagesRequest(Conversation):
    stream: bool = False
    max_tokens: Positive
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Count = 0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop_sequences: Annotated[
        list[str], BeforeValidator(stops, json_schema_input_type=str | list[str])
    ] = Field(default_factory=list)

    @property
    def form(self) -> Form | None:
        given = self.output_config.format
        return Form("json", given.schema_, "output_config.format.schema") if given else None

    def sampling(self, vocab_size: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )


class CountRequest(Conversation):
    """max_tokens and the sampler say nothing about a prompt; their names are known all the same."""

    RULES: ClassVar[FieldRules] = FieldRules(
        REQUEST.refused,
        REQUEST.no_effect
        | {"max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"},
    )


def _joined(blocks: list[Block]) -> str:
    return BETWEEN_BLOCKS.join(block.text for block in blocks if block.type == "text")


def _said(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as one turn, after the results of tools it brings."""
    blocks = message.content
    results = [
        {"role": "tool", "content": _joined(block.content), "tool_call_id": block.tool_use_id}
        for block in blocks
        if block.type == "tool_result"
    ]
    turn: dict[str, Any] = {"role": message.role, "content": _joined(blocks)}
    if thoughts := "".join(block.thinking for block in blocks):
        turn["reasoning_content"] = thoughts
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        turn["tool_calls"] = calls
    is_silent = results and not turn["content"]
    return results if is_silent else [*results, turn]


def _is_same_turn(before: dict[str, Any], after: dict[str, Any]) -> bool:
    roles = {before["role"], after["role"]}
    return len(roles) == 1 and not roles & {"tool", "system"} and "tool_calls" not in before
