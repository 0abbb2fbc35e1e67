"""The fields of OpenAI that offer tools, as one ToolUse.

Owns: their shapes and names on chat completions, where a function stands within its tool, and on
responses, where a tool is the function. Must not know: how models write calls, grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .asking import Asked
from .errors import refused
from .tools import MAX_TOOLS, ToolUse, offered

NAME = r"^[a-zA-Z0-9_.:-]{1,64}$"


def _parameters(value: Any) -> Any:
    if not isinstance(value, dict | None):
        raise ValueError("must be a JSON schema: an object")
    return value


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Annotated[Any, BeforeValidator(_parameters)] = None
    strict: bool | None = None
    """Changes nothing: arguments always fit the schema."""


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["function"]
    function: Function


class FlatTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if (kind := given.get("type")) != "function":
            shown = kind[:40] if isinstance(kind, str) else "no type"
            raise ValueError(f"{shown}: only functions are supported")
        return {name: value for name, value in given.items() if value is not None}


def _choice(value: Any, name_of: Callable[[Any], Any], allowed: Any) -> Any:
    """none, auto, required, or the names that may be called with whether one has to be.

    allowed: where allowed_tools have their mode and tools.
    """
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    name = name_of(value)
    if isinstance(name, str) and value.get("type") == "function":
        return {"mode": "named", "names": [name]}
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        inner = allowed if isinstance(allowed, dict) else {}
        tools, mode = inner.get("tools"), inner.get("mode")
        names = [name_of(tool) for tool in tools] if isinstance(tools, list) else []
        if mode in ("auto", "required") and names and all(isinstance(n, str) for n in names):
            return {"mode": mode, "names": names}
    raise ValueError(
        'must be "none", "auto", "required", a function by name, or allowed_tools with its mode'
    )


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _nested_choice(value: Any) -> Any:
    return _choice(
        value, lambda tool: _get(_get(tool, "function"), "name"), _get(value, "allowed_tools")
    )


def _flat_choice(value: Any) -> Any:
    return {"read": _choice(value, lambda tool: _get(tool, "name"), value), "given": value}


class OffersTools(Asked):
    """What both routes share."""

    PLACE: ClassVar[str]
    """Where function number {} stands."""

    parallel_tool_calls: bool = True

    def offer(self, functions: list[Function], choice: Any) -> ToolUse | None:
        """choice: as `_choice` reads it."""
        if not functions:
            if choice not in (None, "none", "auto"):
                raise refused("tool_choice: there are no tools", param="tool_choice")
            return None
        if choice == "none":
            return None
        mode: Any = choice or "auto"
        names: list[str] = []
        if isinstance(choice, Mapping):
            mode, names = choice["mode"], choice["names"]
        return offered(
            [function.model_dump(exclude_none=True, exclude={"type"}) for function in functions],
            mode=mode,
            names=names,
            several=self.parallel_tool_calls,
            place=self.PLACE,
        )


class ToolFields(OffersTools):
    """On chat completions."""

    PLACE: ClassVar[str] = "tools[{}].function"

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Annotated[Any, BeforeValidator(_nested_choice)] = None

    @property
    def tool_use(self) -> ToolUse | None:
        return self.offer([tool.function for tool in self.tools], self.tool_choice)


class FlatToolFields(OffersTools):
    """On responses."""

    PLACE: ClassVar[str] = "tools[{}]"

    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Annotated[Any, BeforeValidator(_flat_choice)] = None

    @property
    def tool_use(self) -> ToolUse | None:
        return self.offer([*self.tools], _get(self.tool_choice, "read"))

    @property
    def tool_choice_given(self) -> Any:
        """As the client wrote it."""
        return _get(self.tool_choice, "given") or "auto"
