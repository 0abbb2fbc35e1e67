"""BPE by merge rank, through the `tokenizers` library: byte-level (`gpt2`) and raw (`gemma4`).

Owns: turning tokens and merges into the library's model, and the byte alphabet.
Must not know: special tokens, BOS, templates. Called by tokenizer.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from .errors import FileFormatError, RequestError
from .pretokenizers import PreTokenizer
from .tokenizer_special import SPACE_MARK
from .tokenizer_vocab import TokenType, Vocab, check_byte_tokens, is_utf8

# Which types may come out of merging. Control and unknown tokens never: the text "<|im_end|>"
# in a user's message must not become the token.
_MERGEABLE = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable letter for each byte: itself where visible, else 256 and up in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_LETTER = _byte_alphabet()
# These can be part of a UTF-8 text; a vocabulary may lack the others.
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}


class ByteLevelBPE:
    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any], pre: PreTokenizer) -> None:
        ids = _mergeable_ids(vocab)
        merges = _read_merges(vocab, metadata, ids)
        model = _bpe(ids, merges, ignore_merges=pre.ignore_merges)
        self._library = tokenizers.Tokenizer(model)
        self._library.pre_tokenizer = pre.build()
        if normalizer := pre.normalizer():
            self._library.normalizer = normalizer
        known = {byte for letter, byte in BYTE_OF_LETTER.items() if letter in ids}
        self._missing_bytes = _UTF8_BYTES - known

    def encode(self, text: str) -> list[int]:
        # The library would leave such bytes out without a word.
        if self._missing_bytes and (lost := self._missing_bytes.intersection(text.encode())):
            raise RequestError(
                f"the text needs byte 0x{min(lost):02X}, for which the vocabulary has no token"
            )
        return _ids(self._library, text)


class RawBPE:
    """Gemma 4: merges on plain text with a mark for spaces, cut only at line breaks."""

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]) -> None:
        check_byte_tokens(vocab)
        ids = _mergeable_ids(vocab)
        merges = _read_merges(vocab, metadata, ids)
        unknown_id = next(iter(vocab.of_type(TokenType.UNKNOWN)), vocab.ids.get("<unk>"))
        unknown = None if unknown_id is None else vocab.tokens[unknown_id]
        if unknown is not None:
            ids[unknown] = vocab.ids[unknown]
        model = _bpe(ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
        self._library = tokenizers.Tokenizer(model)
        self._library.normalizer = normalizers.Replace(" ", SPACE_MARK)
        self._library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")

    def encode(self, text: str) -> list[int]:
        return _ids(self._library, text)


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    # Only the batch call lets other threads run meanwhile: a text may take seconds.
    [encoding] = library.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def token_bytes(text: str, type_: int) -> bytes:
    """User-defined tokens are stored as plain text, all others in the byte alphabet."""
    if type_ != TokenType.USER_DEFINED and all(letter in BYTE_OF_LETTER for letter in text):
        return bytes(map(BYTE_OF_LETTER.__getitem__, text))
    return text.encode("utf-8", "surrogateescape")


def _mergeable_ids(vocab: Vocab) -> dict[str, int]:
    hidden = {vocab.tokens[i] for i in vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN)}
    # Texts with lone surrogates are raw bytes of the file; no text can contain them.
    return {text: id_ for text, id_ in vocab.ids.items() if text not in hidden and is_utf8(text)}


def _read_merges(
    vocab: Vocab, metadata: Mapping[str, Any], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        if metadata.get("tokenizer.ggml.pre") == "kimi-k2":
            return merges_from_ranks(ids)
        raise FileFormatError("tokenizer.ggml.merges is missing; a byte-pair tokenizer needs it")
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise FileFormatError("tokenizer.ggml.merges must be a list of strings")
    merges = [tuple(line.split(" ")) for line in lines]
    for at, merge in enumerate(merges):
        if len(merge) != 2:
            raise FileFormatError(
                f"tokenizer.ggml.merges[{at}] is {lines[at]!r}, not two texts and a space"
            )
    hidden = {vocab.tokens[i] for i in vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN)}
    return [m for m in merges if m[0] + m[1] not in hidden and hidden.isdisjoint(m)]


def merges_from_ranks(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that has only ranks (the id is the rank): every way to make a
    token from two others, earlier tokens first."""
    return [
        (text[:cut], text[cut:])
        for text in sorted(ids, key=ids.__getitem__)
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]


def _bpe(ids: dict[str, int], merges: Iterable[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(ids, list(merges), **options)
    except Exception as error:  # the library raises bare Exception
        raise FileFormatError(f"tokenizer.ggml.merges does not fit the tokens: {error}") from error
