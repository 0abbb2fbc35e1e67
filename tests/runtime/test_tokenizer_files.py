"""Metadata from strangers: defaults where keys are absent, refusals where they are wrong."""

import pytest
from martlet.runtime.errors import FileFormatError, UnsupportedError
from martlet.runtime.tokenizer import Tokenizer

from . import vocabularies as v


def test_customary_special_tokens_count_only_where_they_are_control_tokens():
    spm = Tokenizer.from_metadata(v.spm())
    assert (spm.bos_id, spm.eos_id, spm.add_bos) == (1, 2, True)
    byte_level = Tokenizer.from_metadata(v.byte_level())
    assert (byte_level.bos_id, byte_level.eos_id, byte_level.add_bos) == (None, None, False)
    bert = Tokenizer.from_metadata(v.wordpiece())
    assert (bert.bos_id, bert.sep_id, bert.add_bos) == (v.CLS, v.SEP, True)


def test_pre_tokenizers_that_add_bos_do_so_unless_the_file_says_no():
    keys = {"pre": "llama-bpe", "bos_token_id": v.IM_START}
    assert Tokenizer.from_metadata(v.byte_level(**keys)).add_bos
    assert not Tokenizer.from_metadata(v.byte_level(add_bos_token=False, **keys)).add_bos


def test_gemma4_adds_bos_against_its_own_key():
    assert Tokenizer.from_metadata(v.raw_bpe()).add_bos


def test_eos_is_added_only_when_the_file_asks():
    tokenizer = Tokenizer.from_metadata(v.spm(add_eos_token=True))
    assert tokenizer.encode("ab", add_special=True, parse_special=False) == [1, v.S_AB, 2]


def test_an_id_of_minus_one_means_none():
    tokenizer = Tokenizer.from_metadata(v.byte_level(bos_token_id=2**32 - 1, eos_token_id=-1))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_a_missing_or_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    for name in ("default", "qwen9"):
        with pytest.raises(UnsupportedError, match=f"{name}.*llama-bpe.*tekken"):
            Tokenizer.from_metadata(v.byte_level(pre=name))
    metadata = v.byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedError, match="missing"):
        Tokenizer.from_metadata(metadata)
    assert Tokenizer.from_metadata(metadata, pre="gpt-2").vocab_size == 267


@pytest.mark.parametrize("model", ["rwkv", None, ["llama"]])
def test_an_unknown_algorithm_is_refused_with_the_known_ones(model):
    with pytest.raises(UnsupportedError, match=r"bert.*gemma4.*gpt2.*llama"):
        Tokenizer.from_metadata(v.spm() | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", [], "at least one"),
        ("tokens", None, "at least one"),
        ("token_type", [1, 2], "2 entries for 270"),
        ("scores", [0.0], "1 entries for 270"),
        ("scores", None, "scores is missing"),
        ("scores", [float("nan")] * 270, "not a number"),
        ("bos_token_id", 270, "270 entries"),
        ("eos_token_id", -7, "-7"),
        ("eot_token_id", 1.5, "1.5"),
        ("eot_token_id", "</s>", "</s>"),
        ("token_type", ["x"] * 270, "list of numbers"),
    ],
)
def test_wrong_sentencepiece_files_are_refused(key, value, message):
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_metadata(v.spm() | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("text", ["<0x4>", "<0xZZ>", "A", "<0x 1>"])
def test_a_byte_token_must_read_as_one(text):
    for metadata in (v.spm(), v.raw_bpe()):
        metadata["tokenizer.ggml.tokens"][50] = text
        with pytest.raises(FileFormatError, match="token 50"):
            Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["a b", "ab"], r"merges\[1\]"),
        (["a b c"], r"merges\[0\]"),
        (["a zzz"], "zzz"),
        ([1, 2], "list of strings"),
        (7, "list of strings"),
        (None, "merges is missing"),
    ],
)
def test_wrong_merges_are_refused(merges, message):
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_metadata(v.byte_level() | {"tokenizer.ggml.merges": merges})


def test_a_bos_that_must_be_added_must_exist():
    with pytest.raises(FileFormatError, match="no bos token"):
        Tokenizer.from_metadata(v.byte_level(add_bos_token=True))


def test_repeated_and_empty_tokens_are_harmless():
    metadata = v.spm()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[v.SPM_AA], tokens[v.SPACES_2] = tokens[v.AB], ""
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode_content("ab") == [v.S_AB]
    assert tokenizer.encode_content("cab") == [v.SPACE, v.C, v.AB]


def test_tokens_that_are_not_utf8_keep_their_bytes():
    for metadata in (v.spm(), v.byte_level(merges=(), special=[("x", 1)] * 14)):
        metadata["tokenizer.ggml.tokens"][-1] = "\udcff\udcfe"
        tokenizer = Tokenizer.from_metadata(metadata)
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xff\xfe"
        assert tokenizer.decode(tokenizer.encode_content("ab")) == "ab"


def test_undefined_types_are_ordinary_text():
    metadata = v.spm()
    metadata["tokenizer.ggml.token_type"][v.AB] = 0
    assert Tokenizer.from_metadata(metadata).encode_content("ab") == [v.S_AB]
    del metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_metadata(metadata).special_ids == frozenset()
