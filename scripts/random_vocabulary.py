"""A byte-level vocabulary of any size, with which every text can be encoded and decoded again.
Owns the tokens of model files with random weights; must not know how a file is written.

    bytes | pairs of letters, the only merges | words of three letters and more | control tokens
"""

from __future__ import annotations

from itertools import count, islice, product
from string import ascii_lowercase
from typing import Any

from martlet.quant.errors import MartletError
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER
from martlet.runtime.tokenizer_vocab import TokenType

BEGIN, END, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
_CONTROL = (BEGIN, END, END_OF_TURN)
LEAST_SIZE = 256 + len(_CONTROL)


def vocabulary(size: int) -> dict[str, Any]:
    """The metadata keys of a tokenizer that both martlet and llama.cpp read."""
    if size < LEAST_SIZE + 1:
        raise MartletError(
            f"a vocabulary of {size} tokens has no room for 256 bytes, a pair and"
            f" {len(_CONTROL)} control tokens; ask for at least {LEAST_SIZE + 1}"
        )
    letters = sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__)
    words = list(islice(_words(), size - LEAST_SIZE))
    merges = [f"{word[0]} {word[1]}" for word in words if len(word) == 2]
    tokens = [*letters, *words, *_CONTROL]
    first_control = size - len(_CONTROL)
    types = [int(TokenType.NORMAL)] * first_control + [int(TokenType.CONTROL)] * len(_CONTROL)
    values = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": first_control,
        "eos_token_id": first_control + 1,
        "eot_token_id": first_control + 2,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _words() -> Any:
    """aa, ab, … zz, aaa, …"""
    for length in count(2):
        yield from map("".join, product(ascii_lowercase, repeat=length))
