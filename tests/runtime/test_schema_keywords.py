"""Every keyword of JSON Schema is kept or refused: none is dropped without a word (B70)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY
from martlet.runtime.errors import RequestError
from martlet.runtime.grammar import Grammars

from .scripted import ScriptedTokenizer
from .test_grammar import accepts, compiled

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}

# One schema for each keyword that says which values are valid, and a value that breaks it.
BROKEN: dict[str, tuple[dict[str, Any], Any]] = {
    "type": ({"type": ["string", "null"]}, 1),
    "enum": ({"enum": [1, "a"]}, 2),
    "const": ({"const": [1]}, [2]),
    "multipleOf": ({**NUMBER, "multipleOf": 3}, 4),
    "maximum": ({**NUMBER, "maximum": 5}, 6),
    "exclusiveMaximum": ({**NUMBER, "exclusiveMaximum": 5}, 5),
    "minimum": ({**NUMBER, "minimum": 5}, 4),
    "exclusiveMinimum": ({**NUMBER, "exclusiveMinimum": 5}, 5),
    "maxLength": ({**TEXT, "maxLength": 2}, "abc"),
    "minLength": ({**TEXT, "minLength": 2}, "a"),
    "pattern": ({**TEXT, "pattern": "^[ab]+$"}, "abc"),
    "format": ({**TEXT, "format": "date"}, "yesterday"),
    "items": ({"type": "array", "items": NUMBER}, ["a"]),
    "items, none": ({"type": "array", "prefixItems": [NUMBER], "items": False}, [1, 2]),
    "prefixItems": ({"type": "array", "prefixItems": [NUMBER]}, ["a"]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1, 2]),
    "minItems": ({"type": "array", "minItems": 2}, [1]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "contains": TEXT}, [1]),
    "minContains": ({"type": "array", "contains": TEXT, "minContains": 2}, ["a"]),
    "maxContains": ({"type": "array", "contains": TEXT, "maxContains": 1}, ["a", "b"]),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, [1]),
    "properties": ({"type": "object", "properties": {"a": NUMBER}}, {"a": "x"}),
    "required": ({"type": "object", "required": ["a"]}, {"b": 1}),
    "additionalProperties": ({"type": "object", "additionalProperties": NUMBER}, {"a": "x"}),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": NUMBER}}, {"xa": "x"}),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    "minProperties": ({"type": "object", "minProperties": 2}, {"a": 1}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1},
    ),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, {"a": 1}),
    "allOf": ({"allOf": [NUMBER, {"minimum": 3}]}, 2),
    "anyOf": ({"anyOf": [NUMBER, TEXT]}, None),
    "oneOf": ({"oneOf": [{**NUMBER, "minimum": 3}, {**NUMBER, "maximum": 5}]}, 4),
    "not": ({**NUMBER, "not": {"const": 4}}, 4),
    "if": ({**NUMBER, "if": {"minimum": 3}, "then": {"multipleOf": 2}}, 5),
    "else": ({**NUMBER, "if": {"minimum": 3}, "else": {"multipleOf": 2}}, 1),
    "$ref": ({"$ref": "#/$defs/n", "$defs": {"n": NUMBER}}, "a"),
    "beside $ref": ({"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": NUMBER}}, 4),
    "$dynamicRef": ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", **NUMBER}}}, "a"),
}
OF_DRAFT_7 = {
    "items, several": ({"type": "array", "items": [NUMBER]}, ["a"]),
    "additionalItems": (
        {"type": "array", "items": [NUMBER], "additionalItems": False},
        [1, 2],
    ),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ScriptedTokenizer())


@pytest.mark.parametrize("name", [*BROKEN, *OF_DRAFT_7])
def test_b70_no_keyword_is_dropped(grammars: Grammars, name: str) -> None:
    schema, value = (BROKEN | OF_DRAFT_7)[name]
    draft = jsonschema.Draft7Validator if name in OF_DRAFT_7 else jsonschema.Draft202012Validator
    checker = draft(schema, format_checker=draft.FORMAT_CHECKER)
    assert not checker.is_valid(value), "the value is to break it"
    refusal, accepted = "", False
    try:
        accepted = accepts(compiled(grammars, schema), json.dumps(value))
    except RequestError as error:
        refusal = str(error)
    assert not accepted
    assert not refusal or name.split(",")[0] in refusal


def test_b70_every_keyword_is_looked_at() -> None:
    told = {"then", "$ref", "$dynamicRef"}
    for vocabulary in ("applicator", "unevaluated", "validation"):
        uri = f"https://json-schema.org/draft/2020-12/meta/{vocabulary}"
        told |= set(REGISTRY.contents(uri)["properties"])
    assert len(told) > 30
    assert told <= {name.split(",")[0] for name in BROKEN} | {"then"}
