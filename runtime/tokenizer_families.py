"""What each value of `tokenizer.ggml.model` means: an algorithm, and defaults for absent keys.

Owns: the table of families. Must not know: special tokens in text, decoding rules of whole texts.
Called by tokenizer.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import tokenizer_bpe, tokenizer_spm, tokenizer_unigram, tokenizer_wordpiece
from .pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from .tokenizer_vocab import TokenType, Vocab, flag, role_id


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of text that holds no special token."""


@dataclass(frozen=True)
class Family:
    """What the value of `tokenizer.ggml.model` stands for when the file leaves keys out."""

    build: Callable[[Vocab, Mapping[str, Any]], Encoder]
    token_bytes: Callable[[str, int], bytes]
    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    follows_pre: bool = False  # the pre-tokenizer's row decides how to cut and whether BOS is added
    space_prefix: bool = False
    bos_role: str = "bos"
    forces_bos: bool = False  # Gemma 4 files say add_bos_token = false, against their own model
    hides_first_space: bool = False

    def adds_bos(self, metadata: Mapping[str, Any]) -> bool:
        """Where add_bos_token is absent."""
        row = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))
        return self.add_bos or (self.follows_pre and row is not None and row.add_bos)


def _build_byte_level(vocab: Vocab, metadata: Mapping[str, Any]) -> Encoder:
    pre = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    return tokenizer_bpe.ByteLevelBPE(vocab, metadata, pre)


def _build_sentencepiece(vocab: Vocab, metadata: Mapping[str, Any]) -> Encoder:
    unknown = role_id(metadata, "unknown", vocab)
    if unknown is None:
        unknown = next(iter(vocab.of_type(TokenType.UNKNOWN)), vocab.ids.get("<unk>"))
    prefix = flag(metadata, "add_space_prefix", True)
    return tokenizer_spm.sentencepiece_bpe(vocab, unknown_id=unknown, space_prefix=prefix)


def _build_unigram(vocab: Vocab, metadata: Mapping[str, Any]) -> Encoder:
    unknown = role_id(metadata, "unknown", vocab)
    if unknown is None:
        unknown = next(iter(vocab.of_type(TokenType.UNKNOWN)), None)
    return tokenizer_unigram.sentencepiece_unigram(vocab, metadata, unknown_id=unknown)


def _build_wordpiece(vocab: Vocab, metadata: Mapping[str, Any]) -> Encoder:
    unknown = role_id(metadata, "unknown", vocab, default=100)
    return tokenizer_wordpiece.WordPiece(vocab, metadata, unknown_id=unknown)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        _build_sentencepiece,
        tokenizer_spm.token_bytes,
        bos=1,
        eos=2,
        add_bos=True,
        space_prefix=True,
    ),
    "gpt2": Family(_build_byte_level, tokenizer_bpe.token_bytes, bos=11, eos=11, follows_pre=True),
    "gemma4": Family(tokenizer_bpe.RawBPE, tokenizer_spm.token_bytes, forces_bos=True),
    "t5": Family(_build_unigram, tokenizer_spm.token_bytes, eos=1, add_eos=True, space_prefix=True),
    "bert": Family(
        _build_wordpiece,
        tokenizer_wordpiece.token_bytes,
        bos=101,
        bos_role="cls",
        add_bos=True,
        add_sep=True,
        hides_first_space=True,
    ),
}
