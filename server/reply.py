"""What an answer needs to be written, and what a dialect's writer must be able to do.

Owns: Reply (what stays the same while an answer is made), the Writer protocol. Must not know: any
dialect, sockets, the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..runtime.events import Event
from ..runtime.tokenizer import Tokenizer
from .answer import Choice
from .errors import ApiError

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Everything about an answer that does not change while it is made."""

    id: str
    created: float
    """Seconds since 1970."""
    model: str
    """The name it was asked by."""
    fingerprint: str
    tokenizer: Tokenizer
    request: Any
    """As the dialect reads it."""
    choices: list[Choice]
    echoes: list[str]
    """Prompt text to put before each choice; "" for none."""
    prompt_ids: list[Sequence[int]]
    """Of each choice."""


class Writer(Protocol):
    """Writes one answer in one dialect: streamed as start, events, end; or whole as `body`.

    `event` adds to its choice; `body` is asked once the choices are whole.
    """

    media_type: str
    ping: str
    """A sign of life that every client of the dialect ignores."""

    def start(self) -> str:
        """What comes before any event."""
        ...

    def event(self, index: int, event: Event) -> str:
        """What the event adds; nothing for the end of a choice that failed."""
        ...

    def end(self) -> str:
        """After all choices have ended well."""
        ...

    def error(self, error: ApiError) -> str:
        """The last words of a stream that cannot go on."""
        ...

    def body(self) -> Json: ...


NewWriter = Callable[[Reply], Writer]
