"""Unigram against the `tokenizers` package, on a vocabulary trained here; hostile tables."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import FileFormatError
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.tokenizer_unigram import charsmap
from martlet.scripts.convert_check import PROBES
from tokenizers import models, normalizers, pre_tokenizers

from ..recorded import RECORDED

PROSE = (RECORDED.parent / "quality" / "text.txt").read_text()
TWO_MARKS = "\u1e9b\u0323"
TEXTS = [
    *PROBES,
    "",
    " ",
    "the old man",
    "  two  spaces,   three\tand a tab\nand lines\r\n ",
    "ﬁne ½ ① \uff26\uff35\uff2c\uff2c ｶﾀｶﾅ",
    "naïve café, cafe\u0301",
    "語 語語 the語語語 語the",
    "zero\u200bwidth\u00a0no break\u3000ideographic",
    "▁ mark ▁▁",
    "UPPER lower 12345 !?",
]


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of every length-delimited field of a message; others are passed over."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        if key & 7 == 2:
            size, at = varint(at)
            yield key >> 3, data[at : at + size]
            at += size
        elif key & 7 == 5:
            at += 4
        else:
            _, at = varint(at)


@cache
def trained() -> tuple[dict[str, Any], Any]:
    """A file's metadata, and the library's processor of the same model."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PROSE.split("."), *PROBES]),
        model_writer=out,
        model_type="unigram",
        vocab_size=240,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
        num_threads=1,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.get_piece_size())
    rules = dict(fields(dict(fields(out.getvalue()))[3]))
    types = [3 if model.is_control(i) else 2 if model.is_unknown(i) else 1 for i in ids]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(rules[2], np.int8),
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata, model


@cache
def mine() -> Tokenizer:
    return Tokenizer.from_metadata(trained()[0])


@cache
def library() -> Any:
    """As tokenizer.json of XLM-R has it."""
    metadata, _ = trained()
    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    pairs = [(text, float(score)) for text, score in zip(tokens, scores, strict=True)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=0))
    table = metadata["tokenizer.ggml.precompiled_charsmap"].tobytes()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(table)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return tokenizer


def ids_of(text: str) -> list[int]:
    return mine().encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_tokenizers(text: str) -> None:
    assert ids_of(text) == trained()[1].encode(text)
    if TWO_MARKS not in text:  # where a letter has two, tokenizers replaces all of it and loses one
        assert ids_of(text) == library().encode(text, add_special_tokens=False).ids


@given(st.lists(st.sampled_from([*PROSE[:60], *"語éﬁ½ \n\u200b", "the "])).map("".join))
def test_ids_equal_those_of_tokenizers_on_any_text(text: str) -> None:
    assert ids_of(text) == library().encode(text, add_special_tokens=False).ids


def test_a_text_ends_with_eos_and_comes_back() -> None:
    text = "the old man said"
    assert mine().encode(text, add_special=True, parse_special=False) == [*ids_of(text), 2]
    assert mine().decode([*ids_of(text), 2]) == text
    both = Tokenizer.from_metadata({**trained()[0], "tokenizer.ggml.add_bos_token": True})
    assert both.encode(text, add_special=True, parse_special=False)[0] == 1


def test_without_a_table_nothing_is_replaced() -> None:
    plain = dict(trained()[0])
    del plain["tokenizer.ggml.precompiled_charsmap"]
    tokenizer = Tokenizer.from_metadata(plain)
    assert tokenizer.encode("ﬁ", add_special=False, parse_special=False)[-1] == 0
    assert 0 not in ids_of("fi")


# -- tables from strangers ------------------------------------------------------------------------


def table_of(units: list[int], texts: bytes = b"a\0") -> np.ndarray:
    trie = np.array(units, "<u4").tobytes()
    return np.frombuffer(len(trie).to_bytes(4, "little") + trie + texts, np.uint8)


LEAF = 1 << 31


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (table_of([0] * 255), "points outside"),  # a label of 255 leaves the array
        (table_of([1 << 18] + [0] * 255), "points outside"),
        (table_of([1 << 9 | 1 << 10] + [0] * 255), "points outside"),  # an offset of 256
        (table_of([1 << 8 | 1 << 10, LEAF | 2] + [LEAF] * 254), "points outside"),
        (table_of([0] * 256, b""), "do not end behind"),
        (table_of([0] * 256, b"a"), "do not end behind"),
        (np.array([1, 0, 0], np.uint8), "do not end behind"),
        (np.array([255] * 8, np.uint8), "do not end behind"),
        (np.array([300, 1]), "not a list of bytes"),
        (np.array([0.5]), "not a list of bytes"),
        (np.zeros((2, 2), np.uint8), "not a list of bytes"),
        ("text", "not a list of bytes"),
    ],
)
def test_a_table_that_leads_outside_is_refused(table: object, told: str) -> None:
    with pytest.raises(FileFormatError, match=told):
        charsmap(table)


def test_sound_tables_are_taken() -> None:
    sound = table_of([1 << 8 | 1 << 10, LEAF | 1] + [LEAF] * 254)
    assert charsmap(sound) == sound.tobytes()
    real = trained()[0]["tokenizer.ggml.precompiled_charsmap"]
    assert charsmap(real) == real.tobytes()
    assert charsmap(None) == charsmap(np.zeros(0, np.uint8)) == b""


@given(st.data())
def test_any_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """What is taken is encoded with: a walk outside would be seen by the sanitizers."""
    table = trained()[0]["tokenizer.ggml.precompiled_charsmap"].copy()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(table) - 1))
        table[at] = data.draw(st.integers(-128, 127))
    damaged = {**trained()[0], "tokenizer.ggml.precompiled_charsmap": table}
    try:
        tokenizer = Tokenizer.from_metadata(damaged)
    except FileFormatError:
        return
    for text in TEXTS:
        tokenizer.encode(text, add_special=False, parse_special=False)
