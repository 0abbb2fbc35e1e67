"""The fields of OpenAI that offer tools, as one ToolUse.

Owns: their shapes and names. Must not know: how models write calls, grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


def _choice(value: Any) -> Any:
    """none, auto, required, or the names that may be called with whether one has to be."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    name = _name(value)
    if isinstance(name, str) and value.get("type") == "function":
        return {"mode": "named", "names": [name]}
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        inner = value.get("allowed_tools")
        inner = inner if isinstance(inner, dict) else {}
        tools, mode = inner.get("tools"), inner.get("mode")
        names = [_name(tool) for tool in tools] if isinstance(tools, list) else []
        if mode in ("auto", "required") and names and all(isinstance(n, str) for n in names):
            return {"mode": mode, "names": names}
    raise ValueError(
        'must be "none", "auto", "required", a function by name, or allowed_tools with its mode'
    )


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


class ToolFields(Asked):
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool = True

    @property
    def tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise refused("tool_choice: there are no tools", param="tool_choice")
            return None
        if choice == "none":
            return None
        mode: Any = choice or "auto"
        names: list[str] = []
        if isinstance(choice, Mapping):
            mode, names = choice["mode"], choice["names"]
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools]
        return offered(functions, mode=mode, names=names, several=self.parallel_tool_calls)
