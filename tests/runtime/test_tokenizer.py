"""Ids worked out by hand for each of the four algorithms, and the way back to text."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import RequestError, UnsupportedError
from martlet.runtime.tokenizer import Tokenizer

from . import vocabularies as v

BYTE_LEVEL = Tokenizer.from_metadata(v.byte_level())
SPM = Tokenizer.from_metadata(v.spm())
SPM_WITHOUT_USER_DEFINED = Tokenizer.from_metadata(v.spm(user=()))
SPM_BARE = Tokenizer.from_metadata(v.spm(add_space_prefix=False))
BERT = Tokenizer.from_metadata(v.wordpiece())
RAW = Tokenizer.from_metadata(v.raw_bpe())

UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Small alphabets reach merges and user-defined tokens far more often than random text.
DENSE_TEXT = st.text(st.sampled_from(" \n\tabchteø<>é漢🚀'1"))
ANY_TEXT = UTF8_TEXT | DENSE_TEXT


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("the the", [ord("t"), v.HE, v.G_THE]),
        ("aaaaaaa", [v.AAAA, v.AA, ord("a")]),  # leftmost pair first
        (" th", [v.G_T, ord("h")]),
        ("é", [0xC3, 0xA9]),
        ("\n\n", [v.NL_NL]),
        ("aøa", [ord("a"), v.ACCENT, ord("a")]),  # user-defined, so not bytes C3 B8
    ],
)
def test_byte_level_ids(text, ids):
    assert plain(BYTE_LEVEL, text) == ids
    assert BYTE_LEVEL.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("abc", [v.S_AB, v.C]),  # "ab" beats "bc" by score, then the space joins
        ("bc", [v.SPACE, v.BC]),
        ("aaa", [v.SPACE, v.SPM_AA, v.A]),  # equal scores: leftmost first
        (" ab", [v.SPACE, v.S_AB]),  # "▁ab" (-3) is better than "▁▁" (-5)
        ("é", [v.SPACE, v.BYTE_0 + 0xC3, v.BYTE_0 + 0xA9]),
        ("<s>", [v.SPACE, v.BYTE_0 + 0x3C, v.BYTE_0 + 0x73, v.BYTE_0 + 0x3E]),
        ("<0x41>", [v.SPACE, *(v.BYTE_0 + b for b in b"<0x41>")]),  # not byte token 0x41
    ],
)
def test_sentencepiece_ids(text, ids):
    assert plain(SPM, text) == ids
    assert SPM.decode(ids) == text


def test_a_missing_sentencepiece_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UnsupportedError, match="pip install sentencepiece"):
        Tokenizer.from_metadata(v.spm())


def test_sentencepiece_without_space_prefix():
    assert plain(SPM_BARE, "abc") == [v.AB, v.C]
    assert plain(SPM_BARE, " ab") == [v.S_AB]
    assert SPM_BARE.decode([v.S_AB]) == " ab"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Playing, the Café", [v.PLAY, v.ING, v.COMMA, v.THE, v.CAFE]),
        ("playthe", [v.UNK]),  # "the" is known only as the start of a word
        ("", []),
    ],
)
def test_wordpiece_ids(text, ids):
    assert plain(BERT, text) == ids
    assert BERT.encode(text, add_special=True, parse_special=False) == [v.CLS, *ids, v.SEP]


def test_wordpiece_text():
    assert BERT.decode([v.CLS, v.PLAY, v.ING, v.COMMA, v.SEP]) == "playing ,"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab ab", [v.R_AB, v.R_S_AB]),
        ("a\n\n\nb", [v.R_A, v.R_NL_NL, v.R_NL, v.R_B]),
        ("é", [v.R_BYTE_0 + 0xC3, v.R_BYTE_0 + 0xA9]),
    ],
)
def test_raw_bpe_ids(text, ids):
    assert plain(RAW, text) == ids
    assert RAW.encode(text, add_special=True, parse_special=False) == [v.R_BOS, *ids]
    assert RAW.decode(ids) == text


@given(ANY_TEXT)
def test_byte_level_round_trip(text):
    assert BYTE_LEVEL.decode(plain(BYTE_LEVEL, text)) == text


@given(ANY_TEXT)
def test_sentencepiece_round_trip(text):
    text = text.replace("▁", "_")  # the space mark itself stands for a space
    # Where special tokens bring the space prefix back, the spaces in between do stay in the text.
    for tokenizer in (SPM_WITHOUT_USER_DEFINED, SPM_BARE):
        assert tokenizer.decode(plain(tokenizer, text)) == text


def spm_by_definition(text: str) -> list[int]:
    """The rule as written: while any adjacent pair makes a piece, join the best-scored leftmost."""
    scores = dict(v.SPM_PIECES)
    first_id = {piece: v.SPACE + i for i, piece in enumerate(scores)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[p], i)
            for i, p in enumerate(map("".join, itertools.pairwise(symbols)))
            if p in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = [[first_id[s]] if s in scores else [v.BYTE_0 + b for b in s.encode()] for s in symbols]
    return [i for group in ids for i in group]


@given(st.text(st.sampled_from(" abcé<")))
def test_sentencepiece_follows_the_definition(text):
    assert plain(SPM_BARE, text) == spm_by_definition(text)


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    for tokenizer in (BYTE_LEVEL, SPM, RAW):
        assert tokenizer.decode(plain(tokenizer, "x \ud83d")) == "x \ufffd"


def test_every_token_has_bytes_and_ids_outside_are_refused():
    for tokenizer in (BYTE_LEVEL, SPM, BERT, RAW):
        for token_id in range(tokenizer.vocab_size):
            is_shown = token_id not in tokenizer.special_ids
            assert bool(tokenizer.token_bytes(token_id)) == is_shown
            assert tokenizer.token_bytes(token_id, special=True)
        for token_id in (-1, tokenizer.vocab_size):
            with pytest.raises(IndexError, match=str(token_id)):
                tokenizer.token_bytes(token_id)


def test_a_text_the_vocabulary_cannot_spell_is_refused_not_shortened():
    metadata = v.byte_level(merges=(), special=())
    metadata["tokenizer.ggml.tokens"] = list("abc")
    metadata["tokenizer.ggml.token_type"] = [1, 1, 1]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert plain(tokenizer, "cab") == [2, 0, 1]
    with pytest.raises(RequestError, match="0x64"):
        plain(tokenizer, "cabd")


def test_sentencepiece_with_neither_bytes_nor_unknown_refuses_a_foreign_letter():
    metadata = v.spm()
    metadata |= {
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.scores": [-1.0, -2.0],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert plain(tokenizer, "ab") == [0, 1]
    with pytest.raises(RequestError, match="2 tokens"):
        plain(tokenizer, "abc")
