"""WordPiece (`tokenizer.ggml.model` = "bert"): whole words, then their longest known parts.

Owns: the mapping between GGUF's spelling and the library's. Must not know: [CLS] and [SEP].
Called by tokenizer.py.

GGUF marks the start of a word ("\u2581word", "ing"), the library its continuation ("word",
"##ing"). Words of more than 100 letters are unknown, as in the source tokenizers.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from .errors import FileFormatError
from .tokenizer_special import SPACE_MARK
from .tokenizer_vocab import TokenType, Vocab, flag, is_utf8

_CONTINUATION = "##"
_LITERAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


class WordPiece:
    def __init__(
        self, vocab: Vocab, metadata: Mapping[str, Any], *, unknown_id: int | None
    ) -> None:
        if unknown_id is None:
            raise FileFormatError("a `bert` tokenizer needs tokenizer.ggml.unknown_token_id")
        if not is_utf8(unknown := vocab.tokens[unknown_id]):
            raise FileFormatError(
                f"token {unknown_id}, the unknown one, is {unknown!r}, not UTF-8; "
                "fetch the file again"
            )
        ids: dict[str, int] = {}
        for id_, (text, type_) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
            if is_utf8(text):  # no text can contain the others
                ids.setdefault(_library_text(text, type_), id_)
        model = models.WordPiece(
            ids,
            unk_token=_library_text(unknown, vocab.types[unknown_id]),
            continuing_subword_prefix=_CONTINUATION,
            max_input_chars_per_word=100,
        )
        lowercase = flag(metadata, "normalizer.lowercase", True)
        self._library = tokenizers.Tokenizer(model)
        self._library.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=flag(metadata, "normalizer.strip_accents", lowercase),
        )
        self._library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def token_bytes(text: str, type_: int) -> bytes:
    return text.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")


def _library_text(text: str, type_: int) -> str:
    if type_ in _LITERAL:
        return text
    return text[1:] if text.startswith(SPACE_MARK) else _CONTINUATION + text
