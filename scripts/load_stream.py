"""What an answer's bytes say: pieces of text with their moments, token counts, its end.
Owns reading JSON and server-sent events; must not know sockets or what is done with the figures.

Reading waits until the answer is over: while streams run, the machine is the server's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
Stamped = tuple[int, bytes]


@dataclass
class Heard:
    """An answer as its client has it; nothing of it is a guess."""

    piece_ns: list[int] = field(default_factory=list)
    piece_totals: list[int | None] = field(default_factory=list)
    """Output tokens up to each piece, where the server tells them."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    reason_ns: int | None = None
    error: str | None = None

    @property
    def n_output(self) -> int:
        """As the server counts; else pieces of text."""
        told = self.usage.get("completion_tokens")
        return len(self.piece_ns) if told is None else int(told)

    @property
    def n_prompt(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def n_cached(self) -> int:
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or self.timings.get("cache_n") or 0)

    @property
    def pieces(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Moments, and the output tokens of each where they are known: told, or as many as pieces.

        The token that ends an answer by itself has no text: it came with the finish reason."""
        moments, totals, n = [*self.piece_ns], [*self.piece_totals], self.n_output
        if self.reason == "stop" and self.reason_ns is not None and len(moments) == n - 1:
            moments.append(self.reason_ns)
            totals.append(n)
        known = [total for total in totals if total is not None]
        if len(known) == len(totals) and known:
            ups = tuple(after - before for before, after in zip([0, *known], known, strict=False))
            if all(up > 0 for up in ups):
                return tuple(moments), ups
        return tuple(moments), (1,) * n if n == len(moments) and n else None


def read_stream(pieces: Sequence[Stamped]) -> Heard:
    """pieces: bytes of server-sent events, and when each came."""
    heard = Heard()
    try:
        for at_ns, data in events(pieces):
            if data == b"[DONE]":
                return heard
            _take(heard, json.loads(data), at_ns)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        heard.error = f"not read: {error!r}"
    if heard.reason is None and not heard.error:
        heard.error = "the stream broke off"
    return heard


def events(pieces: Iterable[Stamped]) -> Iterator[Stamped]:
    """The data of each event, at the moment when its line was there as a whole."""
    rest = b""
    for at_ns, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_ns, line[5:].strip()


def _take(heard: Heard, event: dict[str, Any], at_ns: int) -> None:
    if event.get("error"):
        error = event["error"]
        heard.error = str(error.get("message") if isinstance(error, dict) else error)
        return
    heard.usage = event.get("usage") or heard.usage
    heard.timings = event.get("timings") or heard.timings
    has_text = False
    for choice in event.get("choices") or ():
        text, has_some = text_of(choice)
        heard.text += text
        has_text |= has_some
        if choice.get("finish_reason"):
            heard.reason, heard.reason_ns = choice["finish_reason"], at_ns
    if has_text:
        heard.piece_ns.append(at_ns)
        heard.piece_totals.append((event.get("usage") or {}).get("completion_tokens"))


def text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """The answer's own text, and whether there is any, reasoning and calls included."""
    if choice.get("text"):
        return choice["text"], True
    said = choice.get("delta") or choice.get("message") or {}
    return said.get("content") or "", any(said.get(name) for name in TEXTS)


def read_whole(body: bytes) -> Heard:
    """An answer that was not streamed."""
    heard = Heard()
    try:
        _take(heard, json.loads(body), 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        heard.error = f"not read: {error!r}"
    heard.piece_ns, heard.piece_totals, heard.reason_ns = [], [], None
    if heard.reason is None and not heard.error:
        heard.error = "no finish_reason"
    return heard
