"""Log probabilities in OpenAI's two shapes.

Owns: how a token is written as text and bytes in them. Must not know: streaming, HTTP.

Both list every output token, an end-of-generation token included, so their length is
`completion_tokens`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from ..runtime.events import TokenEvent
from ..runtime.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI documents for "very unlikely".
LOWEST_LOGPROB = -9999.0


class LogprobWriter(Protocol):
    """Writes the tokens of one choice, piece by piece."""

    def write(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]: ...


class ChatLogprobs:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def write(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, event: TokenEvent) -> dict[str, Any]:
        assert event.logprob is not None
        top = [self._entry(*alternative) for alternative in event.logprob.top]
        return {**self._entry(event.token_id, event.logprob.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id, special=True)
        return {"token": token_name(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs": [{text: logprob}], "text_offset"}"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def write(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob.logprob) for token in tokens if token.logprob],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._offset(token.token_id) for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer.token_bytes(token_id, special=True))

    def _top(self, event: TokenEvent) -> dict[str, float]:
        assert event.logprob is not None
        # The drawn token is always listed: readers compare it with the best of these.
        listed = (*event.logprob.top, (event.token_id, event.logprob.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in listed:
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _offset(self, token_id: int) -> int:
        """Characters of text before this token; a character in progress does not count."""
        before = self._n_chars
        self._n_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return before


def token_name(raw: bytes) -> str:
    """The token's text; bytes that are no whole characters are spelled out."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
