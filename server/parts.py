"""The pieces an answer's text is told apart into.

Owns: Part, CallPiece. Must not know: who tells them apart, who writes them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


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
