"""Vocabularies of GGUF files: refused with a typed error, or texts become ids and those bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from martlet.quant.errors import MartletError
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.tokenizer import Tokenizer

from ..quant import gguf_bytes as gb
from ..runtime import vocabularies
from .memory_file import MemoryFile

FILE = MemoryFile()
MOST_BYTES = 16384
TEXT = "Hello  wörld\n\n<|im_end|><tool> the 123 \U0001f600"


def run(data: bytes) -> None:
    with contextlib.suppress(MartletError), GGUFFile.open(FILE.holding(data)) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        for special in (False, True):
            ids = tokenizer.encode(TEXT, add_special=special, parse_special=special)
            assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
            assert isinstance(tokenizer.decode(ids, special=special), str)
        tokenizer.encode_content(TEXT)
        for id_ in range(min(tokenizer.vocab_size, 8)):
            assert isinstance(tokenizer.token_bytes(id_, special=True), bytes)


def stored(key: str, value: Any) -> bytes:
    """A metadata pair with the type that writers give it."""
    if isinstance(value, bool):
        return gb.pair(key, gb.BOOL, bytes([value]))
    if isinstance(value, int):
        return gb.u32_pair(key, value)
    if isinstance(value, str):
        return gb.pair(key, gb.STRING, gb.string(value))
    if isinstance(value, np.ndarray):
        kind = gb.F32 if value.dtype.kind == "f" else gb.I32
        raw = value.astype("<f4" if kind == gb.F32 else "<i4").tobytes()
        return gb.pair(key, gb.ARRAY, struct.pack("<IQ", kind, len(value)) + raw)
    return gb.pair(key, gb.ARRAY, gb.array(gb.STRING, [gb.string(text) for text in value]))


def stored_file(metadata: Mapping[str, Any]) -> bytes:
    return gb.gguf([stored(key, value) for key, value in metadata.items()])


def seeds() -> Iterator[bytes]:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    yield stored_file(vocabularies.byte_level(chat_template=template, add_bos_token=True))
    yield stored_file(vocabularies.spm(add_space_prefix=False, eos_token_id=2))
    yield stored_file(vocabularies.wordpiece())
    yield stored_file(vocabularies.raw_bpe())
    unigram = {key: value for key, value in vocabularies.spm().items() if not key.endswith("model")}
    charsmap = np.frombuffer(b"\x04\0\0\0\0\0\0\0" + bytes(8), np.uint8).astype(np.int32)
    extra = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": charsmap}
    yield stored_file({**unigram, **extra})
    # few tokens, so that a changed byte has a chance to matter
    tokens = {"tokens": ["a", "b", "ab", "<|im_end|>", "Ġ"], "merges": ["a b"], "model": "gpt2"}
    few = {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    types = np.array([1, 1, 1, 3, 1], np.int32)
    yield stored_file({**few, "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": "qwen2"})
