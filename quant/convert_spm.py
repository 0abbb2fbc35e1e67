"""Reads a SentencePiece `tokenizer.model`: pieces with scores and types, and its normaliser.

Owns: the few fields that a GGUF file needs, out of sentencepiece_model.proto. Must not know:
added tokens, roles, templates. The message is read by hand, as runtime writes it by hand: the
`sentencepiece` library tells no type of user-defined pieces and not how text is normalised.

    ModelProto      1: SentencePiece*   2: TrainerSpec   3: NormalizerSpec
    SentencePiece   1: text             2: score (f32)   3: type (same numbers as GGUF's)
    TrainerSpec     3: model_type (1: unigram, 2: BPE)
    NormalizerSpec  2: charsmap  3: add_dummy_prefix  4: remove_extra_whitespaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import FileFormatError, UnsupportedError

_BPE = 2
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_NORMAL = 1
_MAX_TYPE = 6


@dataclass(frozen=True)
class SentencePieceModel:
    texts: list[str]
    scores: list[float]
    types: list[int]
    add_dummy_prefix: bool


def read_model(raw: bytes) -> SentencePieceModel:
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    kind, prefix, removes_spaces, charsmap = 1, True, True, b""  # the message's own defaults
    for field, value in _fields(raw):
        if field == 1:
            text, score, type_ = _read_piece(_bytes(value), len(texts))
            texts.append(text)
            scores.append(score)
            types.append(type_)
        elif field == 2:
            kind = _last(_bytes(value), 3, kind)
        elif field == 3:
            prefix = bool(_last(_bytes(value), 3, prefix))
            removes_spaces = bool(_last(_bytes(value), 4, removes_spaces))
            charsmap = next((_bytes(v) for f, v in _fields(_bytes(value)) if f == 2), b"")
    if not texts:
        raise FileFormatError("tokenizer.model holds no pieces")
    if kind != _BPE:
        raise UnsupportedError(
            f"tokenizer.model is of kind {_KINDS.get(kind, kind)!r}; only 'bpe' is supported"
        )
    if charsmap or removes_spaces:
        what = "a character map" if charsmap else "removal of extra spaces"
        raise UnsupportedError(f"tokenizer.model normalises text by {what}, which GGUF cannot say")
    return SentencePieceModel(texts, scores, types, prefix)


def _read_piece(raw: bytes, at: int) -> tuple[str, float, int]:
    text, score, type_ = b"", 0.0, _NORMAL
    for field, value in _fields(raw):
        if field == 1:
            text = _bytes(value)
        elif field == 2:
            score = _float(_bytes(value))
        elif field == 3:
            type_ = value if isinstance(value, int) else 0
    if not 1 <= type_ <= _MAX_TYPE:
        raise FileFormatError(f"tokenizer.model: piece {at} has the unknown type {type_}")
    try:
        return text.decode(), score, type_
    except UnicodeDecodeError:
        raise FileFormatError(f"tokenizer.model: piece {at} is not UTF-8") from None


def _last(raw: bytes, wanted: int, default: int) -> int:
    found = [v for field, v in _fields(raw) if field == wanted and isinstance(v, int)]
    return found[-1] if found else default


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise FileFormatError("tokenizer.model is not a SentencePiece model: a number for a text")
    return value


def _float(raw: bytes) -> float:
    if len(raw) != 4:
        raise FileFormatError(f"tokenizer.model: a score has {len(raw)} bytes, not 4")
    [value] = struct.unpack("<f", raw)
    return float(value)


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, number or bytes) of a protobuf message."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == 0:
            number, at = _varint(raw, at)
            yield tag >> 3, number
            continue
        if wire not in (1, 2, 5):
            raise FileFormatError(
                f"tokenizer.model is not a SentencePiece model (wire type {wire})"
            )
        n = 8 if wire == 1 else 4
        if wire == 2:
            n, at = _varint(raw, at)
        if n > len(raw) - at:
            raise FileFormatError("tokenizer.model is cut short or not a SentencePiece model")
        yield tag >> 3, raw[at : at + n]
        at += n


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise FileFormatError("tokenizer.model is cut short or not a SentencePiece model")
        byte = raw[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    raise FileFormatError("tokenizer.model is not a SentencePiece model: a number without end")
