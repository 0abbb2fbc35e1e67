"""Calls as tags, as Qwen3-Coder writes them: a function, and in it a parameter for each argument.

Owns: their grammar, and how the text of parameters becomes JSON. Must not know: where calls begin
and end in an answer, requests, dialects.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A value that may be a string is text as it is, of any other type JSON. `pattern` and `format` of
strings are not held; all else of a schema is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..runtime.grammar import json_value, literal

HEAD = re.compile(r"\s*<function=([^<>\n]{1,200})>")
PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200})>")
NEWLINE = literal("\n")
VALUE_END, CALL_END = "</parameter>", "</function>"
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
DEEPEST = 16
"""Choices and references within one another that are followed."""
OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def call_term(name: str, schema: Mapping[str, Any]) -> str:
    """Lark for one call: the parameters in the order of the schema, those required for sure."""
    needed = schema.get("required") or ()
    terms = [literal(f"<function={name}>\n")]
    for key, value in (schema.get("properties") or {}).items():
        begin = literal(f"<parameter={key}>\n")
        term = f"{begin} {_value_term(value, schema)} {NEWLINE}"
        terms.append(f"({term})" if key in needed else f"({term})?")
    return " ".join([*terms, literal(CALL_END)])


def _value_term(schema: Any, root: Mapping[str, Any]) -> str:
    """With the tag that closes it."""
    types, end = types_of(schema, root), literal(f"\n{VALUE_END}")
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and "const" in schema:
        choices = [schema["const"]]
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return f"({' | '.join(map(literal, choices))}) {end}"
    if "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{json_value({**schema, **shared} if isinstance(schema, dict) else schema)} {end}"
    return _text_name(*_bounds(schema))


def text_rules(schemas: Mapping[str, Any]) -> str:
    """The rules that call_terms of these tools refer to: text up to the tag that closes it."""
    properties = (schema.get("properties") or {} for schema in schemas.values())
    bounds = {_bounds(value) for each in properties for value in each.values()}
    return "".join(
        f"{_text_name(least, most)}[lazy]: /(.|\\n){{{least},{most}}}\\n<\\/parameter>/\n"
        for least, most in sorted(bounds)
    )


def _text_name(least: str, most: str) -> str:
    return f"text_{least}_{most or 'any'}"


def _bounds(schema: Any) -> tuple[str, str]:
    """Least and most characters, as a repeat has them. They become part of a grammar: what is no
    count is none, also where the property is of a type that schemas are not checked for."""
    given = schema if isinstance(schema, dict) else {}
    return _count(given.get("minLength")) or "0", _count(given.get("maxLength"))


def _count(given: Any) -> str:
    return str(given) if type(given) is int and given >= 0 else ""


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a value may have; all of them where that is not simply told."""
    return _types_of(schema, root, 0, set()) or TYPES


def _types_of(
    schema: Any, root: Mapping[str, Any], depth: int, followed: set[str]
) -> frozenset[str]:
    """None for a reference that was followed before: choices of itself add nothing to a schema,
    and following each of them again would take as many steps as there are ways through them."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return TYPES
    if isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return frozenset()
        followed.add(reference)
        return _types_of(_resolved(reference, root), root, depth + 1, followed)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & TYPES
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & TYPES
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [_types_of(one, root, depth + 1, followed) for one in schema[key]]
            return frozenset().union(*each)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    return TYPES


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _type_of(value: Any) -> str:
    return "null" if value is None else OF_PYTHON.get(type(value), "object")


class TagArguments:
    """The arguments of one call, as JSON text that grows with what is read."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema if isinstance(schema, dict) else {}
        self._n = 0
        self._types: frozenset[str] = TYPES
        self._value: str | None = None
        """Of the parameter that is open, as far as it is held; None: no parameter is open."""
        self._at_start = False

    def feed(self, held: str) -> tuple[str, str, bool]:
        """JSON text, what is left to be read with more of it, and whether this was the end."""
        written = ""
        while True:
            if self._value is None:
                held = held.lstrip()
                if held.startswith(CALL_END):
                    return written + "}", held[len(CALL_END) :], True
                if not (found := PARAMETER.match(held)):
                    is_begun = _begins(held, CALL_END) or _begins(held, "<parameter=")
                    return (written, held, False) if is_begun else (written + "}", held, True)
                written += self._open(found[1])
                held = held[found.end() :]
            if self._at_start and held:
                held, self._at_start = held.removeprefix("\n"), False
            text, closed, after = held.partition(VALUE_END)
            if not closed:
                n_kept = _unfinished(held)
                written += self._more(held[: len(held) - n_kept])
                return written, held[len(held) - n_kept :], False
            written += self._close(text.removesuffix("\n"))
            held = after

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _open(self, key: str) -> str:
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        self._types = types_of(schema, self._schema)
        self._value, self._at_start = "", True
        between = ", " if self._n else ""
        self._n += 1
        return f"{between}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_text else "")

    def _more(self, text: str) -> str:
        if self._is_text:
            return _escaped(text)
        self._value = (self._value or "") + text
        return ""

    def _close(self, text: str) -> str:
        value, self._value = (self._value or "") + text, None
        if self._is_text:
            return _escaped(text) + '"'
        try:
            kind = _type_of(json.loads(value))
        except ValueError:
            kind = "string"
        allowed = self._types | ({"integer"} if "number" in self._types else frozenset())
        if kind != "string" and kind in allowed:
            return value.strip()
        return json.dumps(value, ensure_ascii=False)


def may_be_head(text: str) -> bool:
    """Whether more text may make the head of a call of it."""
    text = text.lstrip()
    is_short = len(text) < 300 and not set(text[1:]) & set("<>\n")
    return "<function=".startswith(text) or (text.startswith("<function=") and is_short)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _begins(text: str, marker: str) -> bool:
    """Whether more text may make the marker of it. A parameter's name may still be unfinished."""
    return marker.startswith(text) or (text.startswith(marker) and ">" not in text)


def _unfinished(text: str) -> int:
    """Length of the longest end of the text that begins the closing tag, with its newline."""
    tag = f"\n{VALUE_END}"
    ends = (n for n in range(len(tag) - 1, 0, -1) if text.endswith((tag[:n], tag[1 : n + 1])))
    return next(ends, 0)
