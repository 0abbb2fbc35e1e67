"""Keeps what users wrote apart from what the template wrote, through a rendering.

Owns: Content (a string that wears unforgeable marks) and the split of rendered text by those
marks. Must not know: templates, tokens, HTTP. Used by chat.py.

Inside a template a Content behaves like the user's plain text: it can be compared, trimmed, split
and searched. Only when it is written out, or joined with other text, do its marks appear:

    '<|im_start|>user\\n' + content   ->   <|im_start|>user\\n OPEN hello CLOSE
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MARK_CHARS = 10  # of 6400 private-use characters each: 126 random bits
PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class Marks:
    """One rendering's pair of marks: fresh random private-use characters, so no client can send
    them, and no trim, change of case or JSON escaping alters them."""

    open: str
    close: str

    @classmethod
    def fresh(cls) -> Marks:
        return cls(_random_mark(), _random_mark())

    def strip(self, text: str) -> str:
        return text.replace(self.open, "").replace(self.close, "")


def _random_mark() -> str:
    return "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(MARK_CHARS))


class Content(str):
    """The user's text; str(content) is the marked form, everything else sees the text.

    The fields are private because a sandboxed template must not reach the unmarked text.
    """

    _text: str
    _marks: Marks

    def __new__(cls, text: str, marks: Marks) -> Content:
        self = super().__new__(cls, f"{marks.open}{text}{marks.close}" if text else "")
        self._text, self._marks = text, marks
        return self

    def __len__(self) -> int:
        return len(self._text)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == _plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        return _plain(part) in self._text

    def __getitem__(self, key: Any) -> Content:
        return Content(self._text[key], self._marks)

    def __iter__(self) -> Iterator[Content]:
        return (Content(char, self._marks) for char in self._text)


def _plain(value: Any) -> Any:
    return value._text if isinstance(value, Content) else value


def _delegate(name: str) -> Any:
    """The str method `name` on the user's text; strings in its result are content again."""

    def method(self: Content, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._text, name)(*map(_plain_argument, args), **kwargs)
        return mark(result, self._marks)

    method.__name__ = name
    return method


def _plain_argument(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)


# fmt: off
DELEGATED = (
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
    "title", "upper",
)
# fmt: on
for _name in DELEGATED:
    setattr(Content, _name, _delegate(_name))


def mark(value: Any, marks: Marks) -> Any:
    """Every string inside `value`, keys included, as Content."""
    if isinstance(value, str):
        return Content(value, marks)
    if isinstance(value, dict):
        return {mark(key, marks): mark(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mark(item, marks) for item in value)
    return value


class Piece(NamedTuple):
    """A stretch of rendered text from one source."""

    text: str
    is_content: bool


def split_marked(rendered: str, marks: Marks) -> list[Piece]:
    """Rendered text as alternating pieces. Raises ValueError where a mark lost its partner."""
    pieces: list[Piece] = []
    opened = rendered.split(marks.open)
    _append(pieces, opened[0], False, marks)
    for region in opened[1:]:
        content, closed, markup = region.partition(marks.close)
        if not closed:
            raise ValueError("content is not closed")
        _append(pieces, content, True, marks)
        _append(pieces, markup, False, marks)
    return pieces


def _append(pieces: list[Piece], text: str, is_content: bool, marks: Marks) -> None:
    if marks.close in text:
        raise ValueError("content is closed twice")
    if not text:
        return
    if pieces and pieces[-1].is_content == is_content:
        # Two contents that touch are one text to the tokenizer, as they would be without marks.
        text = pieces.pop().text + text
    pieces.append(Piece(text, is_content))
