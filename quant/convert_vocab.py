"""The token list of a checkpoint as a GGUF file holds it: texts, types, scores or merges.

Owns: reading tokenizer.json and tokenizer.model, added tokens, and the fit to the embedding's
rows. Must not know: roles such as bos, chat templates, config.json.

Two kinds: byte-level BPE (`gpt2`) from tokenizer.json, and SentencePiece BPE (`llama`) from
tokenizer.model or, without it, from a tokenizer.json with byte fallback. There the score of a
token is minus the rank of its merge: merging by score then goes in the order of the merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .convert_pretokenizer import PreTokenizerForm, find_name
from .convert_spm import read_model
from .convert_words import Words, read_words
from .errors import FileFormatError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's token types
SPACE_MARK = "\u2581"
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0
_MAX_TOKENS = 1 << 22

# Tokens that mark something although their file calls them ordinary: by whole text, or by ends.
_CONTROL_TEXTS = frozenset(("<pad>", "<mask>", "<2mass>", "[@BOS@]"))
_CONTROL_ENDS = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))


@dataclass
class VocabTable:
    """Columns of the token list; id = index."""

    model: str  # tokenizer.ggml.model
    texts: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str | None = None
    space_prefix: bool | None = None
    normalizer: Mapping[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def metadata(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"model": self.model}
        if self.pre is not None:
            keys["pre"] = self.pre
        keys |= {"tokens": self.texts, "token_type": np.array(self.types, np.int32)}
        if self.scores is not None:
            keys["scores"] = np.array(self.scores, np.float32)
        if self.merges is not None:
            keys["merges"] = self.merges
        if self.space_prefix is not None:
            keys["add_space_prefix"] = self.space_prefix
        keys |= {f"normalizer.{key}": value for key, value in self.normalizer.items()}
        return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def read_vocab(
    checkpoint: Checkpoint, n_rows: int, known: Mapping[str, PreTokenizerForm]
) -> VocabTable:
    """The table with exactly as many tokens as the embedding has rows."""
    tokenizer = checkpoint.json("tokenizer.json")
    table: VocabTable
    if (words := read_words(checkpoint, tokenizer)) is not None:
        table = _wordpiece(words)
        _add_tokens(table, added_tokens(checkpoint, tokenizer), n_rows)
        _fit(table, n_rows)
        return table
    spm = checkpoint.raw("tokenizer.model")
    if tokenizer and (_is_byte_level(tokenizer) or spm is None):
        _check_model(tokenizer.get("model"))
        table = (
            _byte_level(tokenizer, known)
            if _is_byte_level(tokenizer)
            else _byte_fallback(tokenizer)
        )
    elif spm is not None:
        table = _sentencepiece(spm)
    else:
        raise FileFormatError(
            f"{checkpoint.folder}: has neither tokenizer.json nor tokenizer.model; fetch them too"
        )
    _add_tokens(table, added_tokens(checkpoint, tokenizer), n_rows)
    _fit(table, n_rows)
    return table


# -- tokenizer.json -------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise FileFormatError("tokenizer.json: model is not a JSON object")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise UnsupportedError(f"tokenizer.json: the model {kind!r} is not supported, only BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise UnsupportedError(f"tokenizer.json: {key} = {model[key]!r} is not supported")


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Byte-level BPE maps bytes to letters in its pre-tokenizer, and has no byte tokens."""
    node = tokenizer.get("pre_tokenizer")
    inner = node.get("pretokenizers", []) if isinstance(node, dict) else []
    nodes = [node, *inner] if isinstance(inner, list) else [node]
    return any(isinstance(n, dict) and n.get("type") == "ByteLevel" for n in nodes)


def _byte_level(tokenizer: Mapping[str, Any], known: Mapping[str, PreTokenizerForm]) -> VocabTable:
    texts = _texts_by_id(tokenizer["model"].get("vocab"))
    merges = [f"{a} {b}" for a, b in _merge_pairs(tokenizer["model"])]
    pre = find_name(tokenizer, known)
    types = [NORMAL if text is not None else UNUSED for text in texts]
    return VocabTable("gpt2", _padded(texts), types, merges=merges, pre=pre)


def _byte_fallback(tokenizer: Mapping[str, Any]) -> VocabTable:
    model = tokenizer["model"]
    if not model.get("byte_fallback"):
        raise UnsupportedError(
            "tokenizer.json: BPE that is neither byte-level nor falls back to bytes"
        )
    texts = _texts_by_id(model.get("vocab"))
    ranks: dict[str, int] = {}
    for rank, (a, b) in enumerate(_merge_pairs(model)):
        ranks.setdefault(a + b, rank)
    types, scores = [], []
    for text in texts:
        is_byte = text is not None and len(text) == 6 and text[:3] == "<0x" and text[5] == ">"
        type_ = BYTE if is_byte else UNUSED if text is None else NORMAL
        types.append(UNKNOWN if text is not None and text == model.get("unk_token") else type_)
        scores.append(float(-ranks.get(text or "", len(ranks))))
    prefix = _prefixes_space(tokenizer)
    return VocabTable("llama", _padded(texts), types, scores=scores, space_prefix=prefix)


def _prefixes_space(tokenizer: Mapping[str, Any]) -> bool:
    """From the normalizer (older files) or the pre-tokenizer; all else they do is refused."""
    prefixes = False
    normalizer = tokenizer.get("normalizer")
    nodes = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    for node in nodes:
        kind = node.get("type") if isinstance(node, dict) else None
        if kind == "Prepend" and node.get("prepend") == SPACE_MARK:
            prefixes = True
        elif kind != "Replace" or node.get("content") != SPACE_MARK:
            raise UnsupportedError(f"tokenizer.json: the normalizer {kind!r} is not supported")
    cutter = tokenizer.get("pre_tokenizer")
    if cutter is None:
        return prefixes
    kind = cutter.get("type") if isinstance(cutter, dict) else None
    if kind == "Metaspace" and cutter.get("replacement", SPACE_MARK) == SPACE_MARK:
        return prefixes or cutter.get("prepend_scheme", "always") != "never"
    # Gemma's splits at spaces, of which the normalizer has left none.
    pattern = cutter.get("pattern") if kind == "Split" else None
    if isinstance(pattern, dict) and pattern.get("String") == " " and nodes:
        return prefixes
    raise UnsupportedError(f"tokenizer.json: the pre-tokenizer {kind!r} is not supported here")


def _texts_by_id(vocab: Any) -> list[str | None]:
    if not isinstance(vocab, dict) or not vocab:
        raise FileFormatError("tokenizer.json: model.vocab is no table of tokens")
    ids = list(vocab.values())
    for text, id_ in vocab.items():
        if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < _MAX_TOKENS:
            raise FileFormatError(f"tokenizer.json: token {text!r} has the id {id_!r}")
    texts: list[str | None] = [None] * (max(ids) + 1)
    for text, id_ in vocab.items():
        if texts[id_] is not None:
            raise FileFormatError(f"tokenizer.json: {text!r} and {texts[id_]!r} share id {id_}")
        texts[id_] = text
    return texts


def _merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Written as "a b" or, in newer files, as ["a", "b"]."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise FileFormatError("tokenizer.json: model.merges is not a list")
    pairs = []
    for at, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(side, str) for side in pair):
            raise FileFormatError(f"tokenizer.json: merge {at} is {merge!r:.80}, not two texts")
        pairs.append((pair[0], pair[1]))
    return pairs


# -- WordPiece ------------------------------------------------------------------------------------


def _wordpiece(words: Words) -> VocabTable:
    """GGUF marks the first part of a word, checkpoints all others."""
    texts = _texts_by_id(words.vocab)
    types, spelt = [], []
    for text in texts:
        type_ = UNUSED if text is None else UNKNOWN if text == words.unknown else NORMAL
        types.append(type_)
        if text is None or type_ == UNKNOWN:
            spelt.append(text)
        else:
            is_part = text.startswith(words.prefix) and text != words.prefix
            spelt.append(text.removeprefix(words.prefix) if is_part else SPACE_MARK + text)
    return VocabTable("bert", _padded(spelt), types, normalizer=words.normalizer)


# -- tokenizer.model ------------------------------------------------------------------------------


def _sentencepiece(raw: bytes) -> VocabTable:
    model = read_model(raw)
    texts, scores = list(model.texts), list(model.scores)
    for id_, type_ in enumerate(model.types):
        if type_ == USER_DEFINED:
            texts[id_], scores[id_] = texts[id_].replace(SPACE_MARK, " "), _ADDED_SCORE
    return VocabTable(
        "llama", texts, list(model.types), scores=scores, space_prefix=model.add_dummy_prefix
    )


# -- added tokens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddedToken:
    text: str
    special: bool


def added_tokens(checkpoint: Checkpoint, tokenizer: Mapping[str, Any]) -> dict[int, AddedToken]:
    """From every file that may name some; the later in this order decide."""
    found: dict[int, AddedToken] = {}
    for text, id_ in checkpoint.json("added_tokens.json").items():
        found[_added_id(id_, text)] = AddedToken(text, False)
    entries: list[tuple[Any, Any]] = []
    listed = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
    entries += listed.items() if isinstance(listed, dict) else []
    in_json = tokenizer.get("added_tokens") or []
    if not isinstance(in_json, list):
        raise FileFormatError("tokenizer.json: added_tokens is not a list")
    entries += [(entry.get("id") if isinstance(entry, dict) else None, entry) for entry in in_json]
    for id_, entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str):
            raise FileFormatError(f"tokenizer files: added token {id_!r} has no text")
        found[_added_id(id_, content)] = AddedToken(content, bool(entry.get("special", False)))
    return found


def _added_id(value: Any, text: str) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _MAX_TOKENS:
        raise FileFormatError(f"tokenizer files: added token {text!r} has the id {value!r}")
    return number


def looks_like_control(text: str) -> bool:
    return text in _CONTROL_TEXTS or any(
        text.startswith(start) and text.endswith(end) for start, end in _CONTROL_ENDS
    )


def _add_tokens(table: VocabTable, added: Mapping[int, AddedToken], n_rows: int) -> None:
    """Puts added tokens into the table. One without a row in the embedding cannot be used: Gemma's
    tokenizer names a token for images that its text models lack."""
    for id_, token in sorted(added.items()):
        if id_ >= n_rows:
            table.notes.append(f"token {id_} {token.text!r} has no embedding and is left out")
            continue
        while len(table.texts) <= id_:
            _pad(table)
        is_control = token.special or looks_like_control(token.text)
        if table.types[id_] != UNKNOWN:
            table.types[id_] = CONTROL if is_control else USER_DEFINED
        table.texts[id_] = token.text if is_control else token.text.replace(SPACE_MARK, " ")
        if table.scores is not None:
            table.scores[id_] = _ADDED_SCORE


def _fit(table: VocabTable, n_rows: int) -> None:
    if len(table.texts) > n_rows:
        raise FileFormatError(
            f"the tokenizer has {len(table.texts)} tokens, the embedding {n_rows} rows; "
            "the two belong to different models"
        )
    n_padding = n_rows - len(table.texts)
    for _ in range(n_padding):
        _pad(table)
    if n_padding:
        table.notes.append(f"{n_padding} rows of the embedding have no token: written as [PADn]")


def _pad(table: VocabTable) -> None:
    table.texts.append(f"[PAD{len(table.texts)}]")
    table.types.append(UNUSED)
    if table.scores is not None:
        table.scores.append(_PADDING_SCORE)


def _padded(texts: Sequence[str | None]) -> list[str]:
    return [f"[PAD{id_}]" if text is None else text for id_, text in enumerate(texts)]
