"""Tokenizer files from strangers: damaged ones are refused by what is wrong with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError

from ..quant.checkpoints import copied, edit_json
from .test_convert_tokenizer import convert

BYTES = {"type": "ByteLevel", "add_prefix_space": False}
SPLIT = {"type": "Split", "pattern": {"Regex": "a"}, "pretokenizers": [BYTES]}
NAMELESS = {"SpecialToken": {"id": []}}


def test_sampling_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    folder = copied("gemma3", tmp_path)
    text = (
        '{"do_sample": true, "top_k": 1e400, "top_p": "x", "min_p": true, "temperature": 1,'
        f' "repetition_penalty": 1{"0" * 400}}}'
    )
    (folder / "generation_config.json").write_text(text)
    sampling = {k: v for k, v in convert(folder).items() if k.startswith("general.sampling.")}
    assert sampling == {"general.sampling.temp": 1.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "'Unigram'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "share id 0"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}}, "has the id"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "has the id"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "no table of tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}, "not two texts"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}}}, "merges is not a list"),
        ({"model": {"dropout": 0.1}}, "dropout"),
        ({"added_tokens": [{"id": -5, "content": "x"}]}, "has the id -5"),
        ({"added_tokens": [{"id": 5}]}, "has no text"),
        ({"added_tokens": {}}, None),
        ({"added_tokens": [7]}, "has no text"),
        ({"model": []}, "model is not a JSON object"),
        ({"model": None}, "model is not a JSON object"),
        ({"pre_tokenizer": {**SPLIT, "behavior": []}}, "behavior []"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [NAMELESS]}}, None),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, change: Any, told: str | None) -> None:
    folder = copied("llama", tmp_path)
    edit_json(folder / "tokenizer.json", **change)
    if told is None:
        convert(folder)
        return
    with pytest.raises(MartletError) as refusal:
        convert(folder)
    assert told in str(refusal.value)


def test_every_cut_of_a_sentencepiece_model_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    rng = np.random.default_rng(0)
    for n_bytes in [0, 1, *rng.integers(2, len(whole), 60)]:
        (folder / "tokenizer.model").write_bytes(whole[:n_bytes])
        try:
            convert(folder)
        except MartletError:
            continue


def test_random_bytes_are_no_sentencepiece_model(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    rng = np.random.default_rng(1)
    for _ in range(200):
        (folder / "tokenizer.model").write_bytes(rng.bytes(64))
        with pytest.raises(MartletError, match="tokenizer"):
            convert(folder)


def test_unigram_models_are_refused(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    proto = whole + b"\x12\x02\x18\x01"  # the trainer again, of kind 1
    (folder / "tokenizer.model").write_bytes(proto)
    with pytest.raises(UnsupportedError, match="'unigram'"):
        convert(folder)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(FileFormatError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        convert(folder)
