"""Reads tool calls out of an answer's text, piece by piece.

Owns: CallReader. Must not know: dialects, grammars: a model that is held to no grammar is read as
well, and what turns out to be no call is text.

Arguments are passed on as they come, from the moment name and `{` are known. Whitespace around
calls belongs to them.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping
from typing import Any

from .parts import CallPiece, Part
from .tool_formats import ToolFormat
from .tool_tags import HEAD, TagArguments, may_be_head

FIRST_KEY = re.compile(r'\{\s*"([^"\\]{0,40})"')
NO_CALL = -1
ARGUMENTS = ("arguments", "parameters")
"""Models mistake one for the other."""
ID_CHARS = string.ascii_letters + string.digits
PYTHON_TAG = "<|python_tag|>"
"""Llama models may write it before a call."""


class JsonEnd:
    """Finds where an object that begins with `{` ends."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int | None:
        """How much of the text belongs to the object, or None for all of it and more."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class CallReader:
    """One answer's text, and the calls in it."""

    def __init__(
        self, form: ToolFormat, names: Collection[str], schemas: Mapping[str, Any] | None = None
    ) -> None:
        """names: of the tools there are; a call of another one is text. schemas: of their
        arguments; without one, those written as tags have the types they look like."""
        self._form, self._names, self._schemas = form, names, schemas or {}
        self._tags = TagArguments(None)
        self._held = ""
        self._raw = ""  # of the call whose head is being read
        self._json = JsonEnd()
        self._state = self._text if form.begin else self._start
        self.n_calls = 0
        self._n_scanned = 0  # of self._held by self._json, for an object whose head is odd
        key = re.escape(form.arguments_key)
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.){{0,200}}")\s*,\s*"{key}"\s*:\s*(?=\{{)'
        )
        self._keys = ("name", *ARGUMENTS, "id", "type")

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._state(parts):  # each state says whether another one is to go on
            pass
        return parts

    def finish(self, text: str = "") -> list[Part]:
        """The last of it: what has not become a call is text."""
        parts = self.push(text)
        if self._state in (self._text, self._start, self._call):
            rest = self._raw + self._held
            if self.n_calls and not rest.strip():
                rest = ""
            self._say(parts, rest)
        self._held = self._raw = ""
        return parts

    # ---- states: take from self._held, True to go on in another state --------------------------

    def _start(self, parts: list[Part]) -> bool:
        """Formats without a marker: the answer is a call from its beginning, or text."""
        held = self._held.lstrip()
        if PYTHON_TAG.startswith(held[: len(PYTHON_TAG)]) and len(held) < len(PYTHON_TAG):
            return False
        inner = held.removeprefix(PYTHON_TAG).lstrip()
        if not inner:
            return False
        if inner[0] != "{":
            self._state = self._rest
            return True
        self._raw, self._held = self._held[: len(self._held) - len(inner)], inner
        self._state = self._call
        return True

    def _rest(self, parts: list[Part]) -> bool:
        self._say(parts, self._held)
        self._held = ""
        return False

    def _text(self, parts: list[Part]) -> bool:
        before, found, after = self._held.partition(self._form.begin)
        if not found:
            n_kept = _unfinished(self._held, self._form.begin)
            said = self._held[: len(self._held) - n_kept].rstrip()
            self._say(parts, said)
            self._held = self._held[len(said) :]
            return False
        self._say(parts, before.rstrip())
        self._held, self._raw = after, before[len(before.rstrip()) :] + found
        self._state = self._call
        return True

    def _call(self, parts: list[Part]) -> bool:
        """The head of a call: up to its arguments."""
        readers = {"named": self._named, "tagged": self._tagged}
        name, n_head = readers.get(self._form.shape, self._object)()
        if name is None and not n_head:
            return False
        self._json, self._n_scanned = JsonEnd(), 0
        if name is None and n_head != NO_CALL:
            return self._whole(parts, n_head)
        if name is None or name not in self._names:
            return self._no_call(parts)
        self._held, self._raw = self._held[n_head:], ""
        self._open(parts, name)
        self._state = self._arguments
        if self._form.shape == "tagged":
            self._add(parts, "{")
            self._tags, self._state = TagArguments(self._schemas.get(name)), self._tag_arguments
        return True

    def _tag_arguments(self, parts: list[Part]) -> bool:
        text, self._held, is_whole = self._tags.feed(self._held)
        self._add(parts, text)
        if is_whole:
            self._state = self._next
        return is_whole

    def _arguments(self, parts: list[Part]) -> bool:
        n = self._json.feed(self._held)
        text = self._held if n is None else self._held[:n]
        self._add(parts, text)
        self._held = self._held[len(text) :]
        if n is None:
            return False
        self._state = self._after
        return True

    def _after(self, parts: list[Part]) -> bool:
        """The end of the object around the arguments; fields after them are passed over."""
        if self._form.shape != "named":
            _, closed, self._held = self._held.partition("}")
            if not closed:
                return False
        self._state = self._next
        return True

    def _next(self, parts: list[Part]) -> bool:
        """What closes a call, and whether another one follows."""
        form, held = self._form, self._held.lstrip()
        if not held or (len(held) < len(form.end) and form.end.startswith(held)):
            return False
        if form.shape == "list":
            self._state = self._call if held[0] == "," else self._gap
            self._held = held[1:] if held[0] in ",]" else held
        else:
            self._state = self._text if form.begin else self._rest
            self._held = held.removeprefix(form.end) if form.end else held
            if form.end and self._held != held:
                self._state = self._gap
        return True

    def _gap(self, parts: list[Part]) -> bool:
        """Whitespace behind a closed call, and what closes a list of them."""
        self._held = held = self._held.lstrip()
        if self._form.shape == "list" and self._form.end:
            if held and len(held) < len(self._form.end) and self._form.end.startswith(held):
                return False
            self._held = held.removeprefix(self._form.end).lstrip()
        self._state = self._text if self._held else self._gap
        return bool(self._held)

    # ---- helpers -------------------------------------------------------------------------------

    def _named(self) -> tuple[str | None, int]:
        name, found, after = self._held.partition(self._form.between)
        if not found or not after.lstrip():
            return None, 0
        return name.strip(), len(name) + len(found) + len(after) - len(after.lstrip())

    def _tagged(self) -> tuple[str | None, int]:
        if head := HEAD.match(self._held):
            return head[1], head.end()
        return None, 0 if may_be_head(self._held) else NO_CALL

    def _object(self) -> tuple[str | None, int]:
        """The name and the head's length; (None, n): an object of n characters without such a
        head; (None, 0): not known yet."""
        if not self._n_scanned:
            inner = self._held.lstrip(" \n\t[" if self._form.shape == "list" else None)
            self._raw += self._held[: len(self._held) - len(inner)]
            self._held = inner
        held = self._held
        if match := self._head.match(held):
            return _unquoted(match[1]), match.end()
        key = FIRST_KEY.match(held)
        if held and (held[0] != "{" or (key and key[1] not in self._keys)):
            return None, NO_CALL
        n, before = self._json.feed(held[self._n_scanned :]), self._n_scanned
        self._n_scanned = len(held)
        return None, 0 if n is None else before + n

    def _whole(self, parts: list[Part], n: int) -> bool:
        """A call whose keys stand in another order, or whose arguments are a string."""
        try:
            value = json.loads(self._held[:n])
            name = value["name"]
            arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return self._no_call(parts)
        if not isinstance(name, str) or name not in self._names:
            return self._no_call(parts)
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._raw = ""
        self._open(parts, name)
        self._add(parts, arguments)
        self._held = "}" + self._held[n:]  # as after arguments that were read on the way
        self._state = self._after
        return True

    def _no_call(self, parts: list[Part]) -> bool:
        self._say(parts, self._raw)
        self._raw = ""
        self._state = self._text if self._form.begin else self._rest
        return True

    def _open(self, parts: list[Part], name: str) -> None:
        made = "".join(secrets.choice(ID_CHARS) for _ in range(self._form.id_chars))
        prefix = "call_" if self._form.id_chars > len("call_") + 9 else ""
        call_id = prefix + made[len(prefix) :]
        parts.append((False, CallPiece(self.n_calls, call_id, name, "")))
        self.n_calls += 1

    def _add(self, parts: list[Part], arguments: str) -> None:
        if arguments:
            parts.append((False, CallPiece(self.n_calls - 1, "", "", arguments)))

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append((False, text))


def _unquoted(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _unfinished(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
