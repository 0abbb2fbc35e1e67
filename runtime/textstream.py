"""Token ids of one answer to text that may be shown at once.

Owns: whole characters only, and stop strings that never show, not even in part. Must not know:
how ids were chosen or where the text goes. Called by the engine, one stream per answer.

    ids -> bytes -> whole characters -> (held back: what may begin a stop) -> shown
"""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from .errors import RequestError


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes: ...


class TextStream:
    def __init__(
        self,
        tokenizer: TokenBytes,
        stops: Sequence[str] = (),
        *,
        hide_first_space: bool = False,
        show_ids: Collection[int] = (),
    ) -> None:
        """`hide_first_space`: the answer starts a text of its own, not after a prompt (see
        Tokenizer.hides_first_space). `show_ids`: control tokens a parser wants to see by name."""
        self.stopped = False
        self._tokenizer = tokenizer
        self._show_ids = frozenset(show_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopMatcher(stop) for stop in stops]
        self._hide_space = hide_first_space
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that may be shown now; "" while a character or a stop may be unfinished.

        `may_stop` False: its text belongs to no stop string. Never again once it was True."""
        if self.stopped:
            return ""
        raw = self._tokenizer.token_bytes(token_id, special=token_id in self._show_ids)
        return self._release(self._utf8.decode(raw), may_stop)

    def finish(self) -> str:
        """All that was held back. Bytes that never became a character show as one U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str, may_stop: bool = True) -> str:
        if self._hide_space and text:
            text, self._hide_space = text.removeprefix(" "), False
        if not self._stops or not may_stop:
            return text
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            n_matched = max(stop.feed(character) for stop in self._stops)
            if n_matched:
                self.stopped, self._held = True, ""
                return held[: end - n_matched]
        cut = len(held) - max(stop.n_begun for stop in self._stops)
        self._held = held[cut:]
        return held[:cut]


class _StopMatcher:
    """Finds one stop string, a character at a time (Knuth-Morris-Pratt), so that the result does
    not depend on how the text was cut into tokens, and costs the same for any length of stop."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise RequestError("a stop string is empty; leave it out", field="stop")
        self._stop = stop
        self.n_begun = 0  # length of the longest beginning of the stop that the text ends in
        self._shorter = [0] * len(stop)  # per length - 1: the next shorter such beginning
        n = 0
        for at in range(1, len(stop)):
            while n and stop[at] != stop[n]:
                n = self._shorter[n - 1]
            n += stop[at] == stop[n]
            self._shorter[at] = n

    def feed(self, character: str) -> int:
        """Length of the stop if it ends with this character, else 0."""
        while self.n_begun and self._stop[self.n_begun] != character:
            self.n_begun = self._shorter[self.n_begun - 1]
        self.n_begun += self._stop[self.n_begun] == character
        return len(self._stop) if self.n_begun == len(self._stop) else 0
