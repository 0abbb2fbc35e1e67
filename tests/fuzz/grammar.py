"""JSON schemas, patterns and grammars of requests: refused with a RequestError, or a grammar whose
masks take no longer than is allowed. The first byte says what the rest is."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

from martlet.runtime.errors import RequestError
from martlet.runtime.grammar import (
    Grammars,
    check_patterns,
    check_schema,
    choice_grammar,
    json_grammar,
    regex_grammar,
)

from ..server.scripted_engine import byte_tokenizer

MOST_BYTES = 1024
MOST_S = 5.0
GRAMMARS = Grammars(byte_tokenizer())


def run(data: bytes) -> None:
    if not data:
        return
    GRAMMARS._kept.clear()
    text = data[1:].decode("utf-8", "replace")
    begun = time.process_time()
    with contextlib.suppress(RequestError, json.JSONDecodeError):
        match data[0] % 5:
            case 0:
                schema = json.loads(text)
                if not isinstance(schema, dict | bool):
                    return
                check_schema(schema, field="schema")
                GRAMMARS.compile(json_grammar(schema), field="schema")
            case 1:
                check_patterns([text], field="regex")
                GRAMMARS.compile(regex_grammar(text), field="regex")
            case 2:
                GRAMMARS.compile(GRAMMARS.lark(text, field="grammar"), field="grammar")
            case 3:
                GRAMMARS.compile(choice_grammar(text.split("|")), field="choice")
            case _:
                GRAMMARS.compile(text, field="grammar")
    took = time.process_time() - begun
    assert took < MOST_S, f"{took:.1f} s"


def seeds() -> Iterator[bytes]:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            "next": {"$ref": "#/$defs/n"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 0.5}]}},
    }
    yield b"\0" + json.dumps(person).encode()
    yield b'\0{"oneOf": [{"const": 1}, {"type": ["string", "boolean"], "format": "date-time"}]}'
    yield b'\0{"allOf": [{"type": "object"}, {"patternProperties": {"^x": true}}], "not": false}'
    yield rb"\1"[1:] + rb"[a-z]{1,3}(foo|bar)*\d+?\p{Greek}[^\n]"
    yield b"\1(a{1,50}){1,50}"
    yield b'\2root ::= "a" expr* [0-9]+\nexpr ::= "(" root ")" | "\\n"\n'
    yield b'\2start: "a" word\nword: /[a-z]+/\n%ignore " "\n'
    yield b"\3yes|no|maybe"
    yield b'\4start: "a" | b\nb: %json {"type": "string"}\n'
