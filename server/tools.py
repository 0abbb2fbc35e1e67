"""Tools a request offers: what the template is shown, and the grammar of an answer that may call.

Owns: ToolUse, answer_grammar. Must not know: field names of any dialect beyond where a bad schema
stands, how calls are read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..runtime.errors import RequestError
from ..runtime.grammar import Grammar, Grammars, check_schema, json_grammar, literal
from ..runtime.tokenizer import Tokenizer
from .errors import refused
from .structured import Form, compiled, thinking_first
from .tool_formats import ToolFormat, call_rules, free_until_calls

Json = dict[str, Any]
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, at least one."""

    functions: list[Json]
    """Each with name, and description and parameters (a JSON schema) where they were given."""
    mode: Literal["auto", "required", "named"]
    callable: tuple[str, ...]
    """The names that may be called: all, or those the client chose."""
    several: bool = True
    """Whether an answer may have more than one call."""
    field: str = "tools[{}].function.parameters"
    """Where the schema of the tool number {} stands in the request."""

    @property
    def for_template(self) -> list[Json]:
        return [{"type": "function", "function": function} for function in self.functions]

    def schemas(self) -> dict[str, Any]:
        """Of the arguments of those that may be called."""
        return {
            function["name"]: function.get("parameters") or NO_ARGUMENTS
            for function in self.functions
            if function["name"] in self.callable
        }

    def given_schemas(self) -> Iterator[tuple[int, Any]]:
        """The same with the tool's number, of those that have one."""
        for at, function in enumerate(self.functions):
            if function["name"] in self.callable and function.get("parameters"):
                yield at, function["parameters"]


def offered(
    functions: list[Json],
    *,
    mode: Literal["auto", "required", "named"] = "auto",
    names: Sequence[str] = (),
    several: bool = True,
    place: str = "tools[{}].function",
    schema: str = "parameters",
) -> ToolUse | None:
    """None without functions. names: of those that may be called; none given: all.

    place: where function number {} stands in the request, and in it its schema. Raises ApiError.
    """
    known: dict[str, None] = {}
    for at, function in enumerate(functions):
        if function["name"] in known:
            param = f"{place.format(at)}.name"
            raise refused(f"{param}: a tool before has this name", param=param)
        known[function["name"]] = None
    for name in names:
        if name not in known:
            raise refused(f"tool_choice: there is no tool {name!r:.80}", param="tool_choice")
    if not functions:
        return None
    return ToolUse(functions, mode, tuple(names or known), several, f"{place}.{schema}")


def answer_grammar(
    grammars: Grammars,
    tokenizer: Tokenizer,
    use: ToolUse,
    tool_format: ToolFormat,
    form: Form | None,
    *,
    may_think: bool | None,
) -> Grammar | None:
    """None: nothing holds the answer, as its calls have no marker to begin from.

    Raises RequestError naming the tool whose schema cannot be kept.
    """

    def marker(text: str) -> str:
        token_id = control_id(tokenizer, text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    for at, schema in use.given_schemas():
        check_schema(schema, field=use.field.format(at))
        if tool_format.shape == "tagged":  # its rules are not the schema itself
            grammars.compile(json_grammar(schema), field=use.field.format(at))
    several = use.several and use.mode != "named"
    rules = call_rules(use.schemas(), tool_format, marker, several=several)
    try:
        # By itself, as an answer may come to it only behind much else.
        grammars.compile(thinking_first(None) + "answer: calls\n" + rules, field="tools")
    except RequestError:
        # If it is one tool's schema, that one is named.
        for at, schema in use.given_schemas():
            grammars.compile(json_grammar(schema), field=use.field.format(at))
        raise
    if use.mode != "auto":
        answer = "answer: calls\n"
    elif form:
        compiled(grammars, form, may_think=None)
        answer = f"answer: calls | {form.term(grammars)}\n"
    elif tool_format.begin:
        answer = free_until_calls(tool_format, marker, may_think=may_think is False)
    else:
        return None
    field = form.field if form else "tools"
    return grammars.compile(thinking_first(may_think) + answer + rules, field=field)


def control_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The control token with this text, if there is one."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


def shown_ids(tokenizer: Tokenizer, tool_format: ToolFormat) -> frozenset[int]:
    """Control tokens whose text the reader of calls has to see."""
    ids = (control_id(tokenizer, text) for text in (*tool_format.markers, "<|python_tag|>"))
    return frozenset(id_ for id_ in ids if id_ is not None)
