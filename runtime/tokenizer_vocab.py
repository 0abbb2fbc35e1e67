"""The token table of a model file, read from `tokenizer.ggml.*` and checked once.

Owns: token texts, types, scores, and the ids the file gives to roles (bos, eos, ...).
Must not know: how text becomes tokens. Everything here comes from a stranger's file, so every
length and id is compared with the token list before use.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from .errors import FileFormatError

# "No such token" is written as -1, which an unsigned field shows as this number.
NO_TOKEN = 2**32 - 1
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocab:
    tokens: list[str]  # texts in the file's own alphabet (byte-mapped, or with the space mark)
    types: list[int]  # one TokenType per token
    scores: np.ndarray | None  # float32, one per token; SentencePiece-like vocabularies only

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Text to id; where a file repeats a text, the first id counts."""
        return dict(zip(reversed(self.tokens), range(len(self.tokens) - 1, -1, -1), strict=True))

    def of_type(self, *types: TokenType) -> list[int]:
        return np.flatnonzero(np.isin(self.types, types)).tolist()


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or not tokens or not isinstance(tokens[0], str):
        raise FileFormatError("tokenizer.ggml.tokens must be a list of at least one string")
    types = _column(metadata, "token_type", len(tokens), np.int32)
    scores = _column(metadata, "scores", len(tokens), np.float32)
    if scores is not None and np.isnan(scores).any():
        where = int(np.flatnonzero(np.isnan(scores))[0])
        raise FileFormatError(f"tokenizer.ggml.scores[{where}] is not a number")
    if types is None:
        return Vocab(list(tokens), [TokenType.NORMAL] * len(tokens), scores)
    # Type 0 ("undefined") and numbers we do not know are plain text: the harmless reading.
    types[(types < TokenType.NORMAL) | (types > TokenType.BYTE)] = TokenType.NORMAL
    return Vocab(list(tokens), types.tolist(), scores)


def _column(metadata: Mapping[str, Any], name: str, n_tokens: int, dtype: type) -> Any:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    try:
        column: np.ndarray = np.array(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"tokenizer.ggml.{name} must be a list of numbers") from error
    if column.shape != (n_tokens,):
        raise FileFormatError(
            f"tokenizer.ggml.{name} has {column.size} entries for {n_tokens} tokens"
        )
    return column


def is_utf8(text: str) -> bool:
    """False for text with lone surrogates: those are bytes of the file that are no text."""
    return text.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_byte_tokens(vocab: Vocab) -> None:
    """Where bytes are tokens of their own, they must be spelt `<0xNN>`: decoding reads that."""
    for id_ in vocab.of_type(TokenType.BYTE):
        text = vocab.tokens[id_]
        if not _BYTE_TOKEN.fullmatch(text):
            raise FileFormatError(f"token {id_} is marked as a byte but reads {text!r}, not <0xNN>")


def role_id(
    metadata: Mapping[str, Any], role: str, vocab: Vocab, default: int | None = None
) -> int | None:
    """The id a file gives to a role such as "bos", or the algorithm's customary one.

    A customary id counts only where it really is a control token: for a vocabulary of another
    make the same number is an ordinary word, and stopping there would look like a short answer.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None:
        usable = default is not None and default < len(vocab)
        return default if usable and vocab.types[default or 0] == TokenType.CONTROL else None
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    if number in (-1, NO_TOKEN):
        return None
    if not math.isfinite(number) or number != int(number) or not 0 <= number < len(vocab):
        raise FileFormatError(f"{key} is {value!r}, but the token list has {len(vocab)} entries")
    return int(number)


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))
