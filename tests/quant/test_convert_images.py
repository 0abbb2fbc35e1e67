"""Configs of classes that read images: what of them a language model of texts needs."""

import json
from typing import Any

import pytest
from martlet.quant.convert_config import read_settings
from martlet.quant.errors import FileFormatError, UnsupportedError

from ..recorded import RECORDED


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name / "config.json").read_text())
    return found


def test_sections_and_deepstack_are_told_to_other_readers() -> None:
    said = read_settings(config("qwen3vl")).metadata()
    assert said["qwen3vl.rope.dimension_sections"] == [4, 2, 2, 0]
    assert said["qwen3vl.n_deepstack_layers"] == 1
    said = read_settings(config("qwen2vl")).metadata()
    assert said["qwen2vl.rope.dimension_sections"] == [2, 1, 1, 0]
    assert "qwen2vl.n_deepstack_layers" not in said


def test_older_configs_of_qwen2_vl_say_the_same() -> None:
    """All keys side by side, and the kind of rope called mrope."""
    nested = config("qwen2vl")
    flat = {**nested.pop("text_config"), "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope["rope_theta"]}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    assert read_settings(flat).metadata() == read_settings(config("qwen2vl")).metadata()
    assert read_settings({**flat, "rope_scaling": None}).rope_sections == [16, 24, 24, 0]


@pytest.mark.parametrize("sections", [[16, 24], "16", [1, 2, -3], [1, 2, True], 5])
def test_sections_that_are_none_are_refused(sections: object) -> None:
    changed = config("qwen2vl")
    changed["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(FileFormatError, match="mrope_section is"):
        read_settings(changed)


def test_classes_of_texts_have_no_sections() -> None:
    changed = {
        **config("llama"),
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    with pytest.raises(UnsupportedError, match="mrope_section"):
        read_settings(changed)
