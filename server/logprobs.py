"""Log probabilities in OpenAI's two shapes.

Owns: how a token is written as text and bytes in them. Must not know: streaming, HTTP.

Both list every output token, an end-of-generation token included, so their length is
`completion_tokens`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..runtime.events import TokenEvent, TokenLogprob
from ..runtime.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI documents for "very unlikely".
LOWEST_LOGPROB = -9999.0


class LogprobWriter(Protocol):
    """Writes the tokens of one choice, piece by piece."""

    def write(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]: ...

    def echo(self, prompt: EchoedPrompt) -> dict[str, Any]:
        """The tokens of a prompt that comes before those of the answer."""
        ...


class EchoedPrompt(NamedTuple):
    """A prompt that is part of the answer, with its scores."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    """Of each token but the first."""
    text: str
    n_top: int
    """How many alternatives are to be listed; there may be more."""


class ChatLogprobs:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def write(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def echo(self, prompt: EchoedPrompt) -> dict[str, Any]:
        raise NotImplementedError("a chat echoes nothing")

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
            "top_logprobs": [
                self._top(token.token_id, token.logprob) for token in tokens if token.logprob
            ],
            "text_offset": [self._offset(token.token_id) for token in tokens],
        }

    def echo(self, prompt: EchoedPrompt) -> dict[str, Any]:
        scored = list(zip(prompt.ids[1:], prompt.logprobs, strict=True))
        self._n_chars = len(prompt.text)
        return {
            "tokens": [self._name(token_id) for token_id in prompt.ids],
            "token_logprobs": [None, *(_finite(score.logprob) for _, score in scored)],
            "top_logprobs": [None, *(self._top(*pair, prompt.n_top) for pair in scored)],
            "text_offset": text_offsets(self._tokenizer, prompt.ids, prompt.text),
        }

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer.token_bytes(token_id, special=True))

    def _top(
        self, token_id: int, found: TokenLogprob, n_top: int | None = None
    ) -> dict[str, float]:
        # The token itself is always listed: readers compare it with the best of these.
        listed = (*found.top[:n_top], (token_id, found.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in listed:
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _offset(self, token_id: int) -> int:
        """Characters of text before this token; a character in progress does not count."""
        before = self._n_chars
        self._n_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return before


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Characters of `text` before each of its tokens. A control token has a place where the text
    spells it out, and none where the tokenizer put it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at, may_hide = [], 0, tokenizer.hides_first_space
    for token_id in ids:
        offsets.append(at)
        if token_id in tokenizer.special_ids:
            name = tokenizer.token_bytes(token_id, special=True).decode("utf-8", "replace")
            at += len(name) if text.startswith(name, at) else 0
            continue
        piece = decoder.decode(tokenizer.token_bytes(token_id))
        at += len(piece)
        if may_hide and piece:
            at -= piece.startswith(" ") and not text.startswith(" ")
            may_hide = False
    return offsets


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob], n_top: int
) -> list[dict[str, Any] | None]:
    """As vLLM writes them: by id each token of the prompt with its rank, and the n_top best."""
    written: list[dict[str, Any] | None] = [None]
    for token_id, found in zip(ids[1:], logprobs, strict=True):
        best = {best_id: (rank, lp) for rank, (best_id, lp) in enumerate(found.top[:n_top], 1)}
        listed = {token_id: (found.rank, found.logprob)} | best
        written.append(
            {
                str(listed_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(listed_id),
                }
                for listed_id, (rank, logprob) in listed.items()
            }
        )
    return written


def token_name(raw: bytes) -> str:
    """The token's text; bytes that are no whole characters are spelled out."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
