"""The pieces an answer's text is told apart into, and the stretches they make.

Owns: Part, CallPiece, Run. Must not know: who tells them apart, who writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


class CallPiece(NamedTuple):
    """More of a tool call. Its first piece has id and name, the others only arguments."""

    nth: int
    """Among the calls of the answer, from 0."""
    id: str
    name: str
    arguments: str
    """JSON text, to be joined."""


Part: TypeAlias = "tuple[bool, str | CallPiece]"
"""Whether it is reasoning, and a stretch of an answer: text, or of a call where the request has
tools. One per token, so a plain tuple."""

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Run:
    """A stretch of an answer: some of its reasoning, some of its text, or one call."""

    kind: Kind
    text: str = ""
    """Of a call: its arguments."""
    id: str = ""
    name: str = ""
    """Both of a call alone."""
    first: int = 0
    """Of the answer's tokens that made it, and the one behind the last of them."""
    end: int = 0


def kind_of(part: Part) -> Kind:
    is_reasoning, piece = part
    if isinstance(piece, CallPiece):
        return "call"
    return "reasoning" if is_reasoning else "text"


def begins_run(before: Kind | None, part: Part) -> bool:
    """Whether the part does not belong to the run before it."""
    piece = part[1]
    return kind_of(part) != before or (isinstance(piece, CallPiece) and bool(piece.name))
