"""Reads WordPiece vocabularies: from tokenizer.json, or vocab.txt with tokenizer_config.json.

Owns: what is read, and the refusal of variants. Must not know: how a GGUF file spells tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .errors import FileFormatError, UnsupportedError

_PREFIX, _UNKNOWN, _MOST_LETTERS = "##", "[UNK]", 100


@dataclass(frozen=True)
class Words:
    vocab: Mapping[str, Any]  # ids by text
    prefix: str  # of parts that go on with a word
    unknown: str
    normalizer: dict[str, bool]  # lowercase and strip_accents


def read_words(checkpoint: Checkpoint, tokenizer: Mapping[str, Any]) -> Words | None:
    """None where the vocabulary is of another kind."""
    model = tokenizer.get("model")
    if isinstance(model, dict) and model.get("type") == "WordPiece":
        return _of_json(tokenizer, model)
    if tokenizer or (text := checkpoint.text("vocab.txt")) is None:
        return None
    config = checkpoint.json("tokenizer_config.json")
    vocab = {word: id_ for id_, word in enumerate(text.splitlines())}
    lowercase = bool(config.get("do_lower_case", True))
    strips = config.get("strip_accents")
    return Words(vocab, _PREFIX, _UNKNOWN, _normalizer(lowercase, strips))


def _of_json(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> Words:
    prefix = model.get("continuing_subword_prefix", _PREFIX)
    unknown = model.get("unk_token", _UNKNOWN)
    most = model.get("max_input_chars_per_word", _MOST_LETTERS)
    if prefix != _PREFIX or most != _MOST_LETTERS or not isinstance(unknown, str):
        raise UnsupportedError(
            f"tokenizer.json: WordPiece with the prefix {prefix!r} and words of {most!r} letters "
            f"is not supported, only {_PREFIX!r} and {_MOST_LETTERS}"
        )
    steps = [("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")]
    for key, kind in steps:
        node = tokenizer.get(key)
        found = node.get("type") if isinstance(node, dict) else None
        if found != kind:
            raise UnsupportedError(f"tokenizer.json: the {key} {found!r} is not supported here")
    normalizer = tokenizer["normalizer"]
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key) is False:
            raise UnsupportedError(f"tokenizer.json: {key} = False is not supported")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or unknown not in vocab:
        raise FileFormatError(f"tokenizer.json: the vocabulary lacks {unknown!r}")
    lowercase = bool(normalizer.get("lowercase", True))
    return Words(vocab, prefix, unknown, _normalizer(lowercase, normalizer.get("strip_accents")))


def _normalizer(lowercase: bool, strips: bool | None) -> dict[str, bool]:
    """Accents go with capitals where nothing else is said."""
    return {"lowercase": lowercase, "strip_accents": lowercase if strips is None else strips}
