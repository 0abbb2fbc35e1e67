"""Presets: the type of every tensor is the one llama-quantize was recorded to give
(scripts/record_quantizer.py), for models of many kinds, with and without importance."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.quant.mixtures import (
    PRESETS,
    Overrides,
    choices,
    find_preset,
    fitting,
    is_quantized,
    mixture,
)
from martlet.scripts.record_quantizer import CASES, case_metadata, case_shapes

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "quantizer" / "types.json").read_text())


def recorded(case: str, preset: str) -> dict[str, str]:
    entry = RECORDED["cases"][case]
    letters = RECORDED["letters"]
    chosen = zip(entry["names"], entry["presets"][preset], strict=True)
    return {name: letters[letter] for name, letter in chosen if letter != "."}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "F32"])
def test_every_tensor_has_the_type_of_llama_quantize(case: str, preset: str) -> None:
    for has_imatrix in (False, True):
        chosen = mixture(
            find_preset(preset), case_metadata(case), case_shapes(case), has_imatrix=has_imatrix
        )
        assert chosen == recorded(case, preset + "+imatrix" * has_imatrix)


def test_the_record_knows_what_is_not_quantized() -> None:
    names = set(recorded("eight-experts", "Q4_K_M"))
    assert {name for name, shape in case_shapes("eight-experts").items()} - names == {
        name for name in case_shapes("eight-experts") if "norm" in name or "ffn_gate_inp" in name
    }


def chosen_with(overrides: Overrides, case: str = "prose-7m") -> dict[str, str]:
    return mixture(
        find_preset("Q4_K_M"), case_metadata(case), case_shapes(case), overrides=overrides
    )


def test_pure_means_every_matrix() -> None:
    assert set(chosen_with(Overrides(is_pure=True)).values()) == {"Q4_K"}
    assert set(chosen_with(Overrides(is_pure=True), "smollm2-135m").values()) == {"Q5_0", "Q4_K"}


def test_overrides_by_pattern_and_role() -> None:
    patterns = ((r"blk\.[01]\.ffn", "Q8_0"), (r"ffn_up", "Q2_K"))
    chosen = chosen_with(Overrides(patterns=patterns, embedding="Q5_1"))
    assert chosen["blk.1.ffn_up.weight"] == "Q8_0"  # the first pattern that fits
    assert chosen["blk.2.ffn_up.weight"] == "Q2_K"
    assert chosen["token_embd.weight"] == "Q5_1"
    untied = chosen_with(Overrides(output="Q4_0", embedding="Q8_0"), "llama-8b")
    assert (untied["output.weight"], untied["token_embd.weight"]) == ("Q4_0", "Q8_0")
    tied = chosen_with(Overrides(output="Q4_0"))
    assert tied["token_embd.weight"] == "Q4_0"


def test_names_that_people_write() -> None:
    assert find_preset("q4_k").name == "Q4_K_M"
    with pytest.raises(UnsupportedError, match="'Q9'; there are: F32, F16"):
        find_preset("Q9")


@pytest.mark.parametrize(
    ("format_name", "cols", "expected"),
    [("Q6_K", 576, "Q8_0"), ("IQ4_XS", 32, "IQ4_NL"), ("Q4_K", 172, "F16"), ("Q4_0", 40, "F16")],
)
def test_rows_that_do_not_fill_blocks(format_name: str, cols: int, expected: str) -> None:
    assert fitting(format_name, cols) == expected


def test_choices_say_what_the_fallback_replaced() -> None:
    case = case_metadata("smollm2-135m"), case_shapes("smollm2-135m")
    chosen = choices(find_preset("Q4_K_M"), *case)
    assert chosen["blk.0.attn_q.weight"] == ("Q5_0", "Q4_K")
    assert chosen["token_embd.weight"] == ("Q8_0", "Q6_K")
    assert chosen["blk.3.ffn_down.weight"] == ("Q4_K", "Q4_K")
    given = choices(find_preset("Q4_K_M"), *case, overrides=Overrides(embedding="Q4_1"))
    assert given["token_embd.weight"] == ("Q4_1", "Q4_1")


def test_a_matrix_of_one_row_has_one_dimension_in_a_file() -> None:
    assert not is_quantized("blk.0.ffn_up.weight", (1, 256))
    assert is_quantized("blk.0.ffn_up.weight", (2, 256))


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 1.5, -1, "x", "", [], ["x"], [True], np.array([np.nan])]
)
@pytest.mark.parametrize(
    "key", ["block_count", "expert_count", "attention.head_count", "attention.head_count_kv"]
)
def test_counts_that_are_none_are_refused_by_name(key: str, value: Any) -> None:
    metadata = {**case_metadata("prose-7m"), f"llama.{key}": value}
    with pytest.raises(FileFormatError, match=f"^llama.{key} is .*, expected a whole number$"):
        mixture(find_preset("Q4_K_M"), metadata, case_shapes("prose-7m"))


@pytest.mark.parametrize("arch", [None, 5, ["llama"]])
def test_a_file_without_an_architecture_is_refused(arch: Any) -> None:
    with pytest.raises(FileFormatError, match=r"^general\.architecture is "):
        mixture(find_preset("Q4_K_M"), {"general.architecture": arch}, {"a.weight": (4, 256)})
