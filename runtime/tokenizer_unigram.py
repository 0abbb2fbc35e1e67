"""Unigram (`tokenizer.ggml.model` = "t5"): of all ways to cut a text the likeliest, as in XLM-R.

Owns: what a file says of normalization, and the check of its table of replacements. Must not know:
special tokens, BOS and EOS. Called by tokenizer.py; tokenizer_spm.py makes the model.

The table is a 32-bit length, a double-array trie of so many bytes, and texts that end in NUL. The
library walks the trie without looking at its bounds, so a stranger's is checked here: that no walk
leaves the array, and that no leaf points behind the texts. A unit of the trie (Darts-clone) is

    bits 10..30 and 9: offset, shifted by 8 if bit 9 is set     bit 8: a leaf hangs at the offset
    bits 0..7: label     or, with bit 31 set: a leaf, whose other bits are its value
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import FileFormatError
from .tokenizer_spm import UNIGRAM, Normalizer, SentencePiece
from .tokenizer_vocab import Vocab, flag

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LENGTH_BYTES, _LEAF = 4, 1 << 31


def sentencepiece_unigram(
    vocab: Vocab, metadata: Mapping[str, Any], *, unknown_id: int | None
) -> SentencePiece:
    if unknown_id is None:
        raise FileFormatError("a `t5` tokenizer needs tokenizer.ggml.unknown_token_id")
    normalizer = Normalizer(
        charsmap(metadata.get(_KEY)),
        space_prefix=flag(metadata, "add_space_prefix", True),
        single_spaces=flag(metadata, "remove_extra_whitespaces", False),
    )
    return SentencePiece(vocab, unknown_id=unknown_id, algorithm=UNIGRAM, normalizer=normalizer)


def charsmap(value: Any) -> bytes:
    """The table's bytes, checked; none where the file has none. Raises FileFormatError."""
    if value is None:
        return b""
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu" or np.any((array < -128) | (array > 255)):
        raise FileFormatError(f"{_KEY} is not a list of bytes")
    data: bytes = array.astype(np.int64).astype(np.uint8).tobytes()
    if not data:
        return data
    n_trie = int.from_bytes(data[:_LENGTH_BYTES], "little")
    texts = data[_LENGTH_BYTES + n_trie :]
    if n_trie < 4 or n_trie % 4 or not texts or texts[-1]:
        raise FileFormatError(
            f"{_KEY} of {len(data)} bytes has a trie of {n_trie}, and texts that do not end behind "
            "it; fetch the file again"
        )
    units = np.frombuffer(data, "<u4", n_trie // 4, _LENGTH_BYTES).astype(np.int64)
    offset = (units >> 10 & 0x1FFFFF) << ((units & 1 << 9) >> 6)
    base = np.arange(len(units)) ^ offset
    is_inner = units < _LEAF
    outside = is_inner & (base | 0xFF >= len(units))
    if not outside.any():
        leaf = units[base[is_inner & (units >> 8 & 1 > 0)]] & _LEAF - 1
        if not np.any(leaf >= len(texts)):
            return data
    raise FileFormatError(f"{_KEY} points outside itself; fetch the file again")
