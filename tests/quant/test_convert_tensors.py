"""Tensors of a checkpoint as those of a GGUF file: order of rows, fused and tied ones, refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert_config import read_settings
from martlet.quant.convert_tensors import Weight, halves_to_pairs, plan_weights
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError

from .checkpoints import copied, edit_json, rewrite, stored_arrays

Arrays = dict[str, np.ndarray]
ATTENTION = "model.layers.0.self_attn."


def weights_of(folder: Path) -> dict[str, Weight]:
    checkpoint = Checkpoint.open(folder)
    settings = read_settings(checkpoint.json("config.json"))
    return {w.name: w for w in plan_weights(settings, checkpoint.tensors)}


def values_of(folder: Path) -> Arrays:
    return {name: w.rows(0, w.n_rows) for name, w in weights_of(folder).items()}


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert np.array_equal(found[name].view(np.uint32), values.view(np.uint32)), name


# B26: rows of K in the order of the wrong head count. 8 heads and 2 kv heads hide nothing.


@given(heads=st.integers(1, 9), half=st.integers(1, 9))
def test_the_order_of_rows_is_a_permutation_within_heads(heads: int, half: int) -> None:
    dim = 2 * half
    order = halves_to_pairs(np.arange(heads * dim), dim)
    assert sorted(order.tolist()) == list(range(heads * dim))
    assert np.array_equal(order // dim, np.arange(heads * dim) // dim)
    assert np.array_equal(order[0:dim:2], np.arange(half))
    assert np.array_equal(order[1:dim:2], np.arange(half) + half)


def test_q_and_k_change_order_and_come_back_to_the_same_bits(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    arrays, values = stored_arrays(folder), values_of(folder)
    for part, name, heads in (("q_proj", "attn_q", 8), ("k_proj", "attn_k", 2)):
        for kind in ("weight", "bias"):
            found, source = values[f"blk.1.{name}.{kind}"], arrays[
                f"model.layers.1.self_attn.{part}.{kind}"
            ]  # fmt: skip
            back = found.reshape(heads, -1, 2, *found.shape[1:]).swapaxes(1, 2)
            assert np.array_equal(
                back.reshape(source.shape).view(np.uint32), source.view(np.uint32)
            )
    assert np.array_equal(values["blk.0.attn_v.weight"], arrays[f"{ATTENTION}v_proj.weight"])


def test_rows_may_be_read_in_any_pieces(tmp_path: Path) -> None:
    weight = weights_of(copied("llama", tmp_path))["blk.0.attn_k.weight"]
    whole = weight.rows(0, weight.n_rows)
    pieces = [weight.rows(at, min(at + 3, weight.n_rows)) for at in range(0, weight.n_rows, 3)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_gemma_norms_hold_the_sum(tmp_path: Path) -> None:
    folder = copied("gemma3", tmp_path)
    values = values_of(folder)
    stored = stored_arrays(folder)["model.layers.0.self_attn.q_norm.weight"]
    floats = (stored.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(values["blk.0.attn_q_norm.weight"], floats + np.float32(1))


def test_minus_zero_stays(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    arrays["model.norm.weight"][0] = -0.0
    rewrite(folder, arrays)
    assert np.signbit(values_of(folder)["output_norm.weight"][0])


# Several ways to write the same model.


def test_fused_projections_are_split(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    expected, arrays = values_of(folder), stored_arrays(folder)
    for n in range(2):
        for fused, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            for kind in ("weight", "bias"):
                names = [f"model.layers.{n}.{part}.{kind}" for part in parts]
                arrays[f"model.layers.{n}.{fused}.{kind}"] = np.concatenate(
                    [arrays.pop(name) for name in names]
                )
    rewrite(folder, arrays)
    assert_same(values_of(folder), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.", ""),
        ("model.", "model.language_model."),
        ("model.", "language_model.model."),
    ],
)
def test_names_of_the_classes_around_a_model(tmp_path: Path, old: str, new: str) -> None:
    folder = copied("gemma3", tmp_path)
    expected = values_of(folder)
    arrays = {new + name.removeprefix(old): a for name, a in stored_arrays(folder).items()}
    arrays["vision_tower.encoder.weight"] = np.zeros((2, 2), np.int64)
    arrays["model.multi_modal_projector.x"] = np.zeros(2, np.float32)
    rewrite(folder, arrays)
    assert_same(values_of(folder), expected)


def test_buffers_are_left_out(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    expected, arrays = values_of(folder), stored_arrays(folder)
    arrays[f"{ATTENTION}rotary_emb.inv_freq"] = np.ones(4, np.float32)
    rewrite(folder, arrays)
    assert_same(values_of(folder), expected)


# B24: tied embeddings.


def test_a_tied_head_is_not_written(tmp_path: Path) -> None:
    assert "output.weight" not in weights_of(copied("qwen3", tmp_path))


def test_a_tied_head_that_repeats_the_embedding_is_dropped(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    expected, arrays = values_of(folder), stored_arrays(folder)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    rewrite(folder, arrays)
    assert_same(values_of(folder), expected)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    arrays = stored_arrays(folder)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["lm_head.weight"][-1, -1] ^= 1
    rewrite(folder, arrays)
    with pytest.raises(FileFormatError, match="tie_word_embeddings is true"):
        weights_of(folder)


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(FileFormatError, match=r"'lm_head\.weight' of shape .* is missing"):
        weights_of(folder)


# Nothing is missing, nothing is left over, everything has its shape.


def test_every_tensor_that_goes_missing_is_named(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path)
    arrays = stored_arrays(folder)
    for name in arrays:
        rewrite(folder, {n: a for n, a in arrays.items() if n != name})
        with pytest.raises(FileFormatError, match="is missing") as refusal:
            weights_of(folder)
        assert name in str(refusal.value)


def change_shape(arrays: Arrays) -> None:
    arrays[f"{ATTENTION}v_proj.weight"] = arrays[f"{ATTENTION}v_proj.weight"][:-1]


def add_unknown(arrays: Arrays) -> None:
    arrays[f"{ATTENTION}q_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)


def add_twin(arrays: Arrays) -> None:
    arrays["language_model.model.norm.weight"] = arrays["model.norm.weight"]


def quantize(arrays: Arrays) -> None:
    arrays[f"{ATTENTION}q_proj.weight"] = np.zeros((64, 32), np.uint8)


def add_dimension(arrays: Arrays) -> None:
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:, None, None, None]


def drop_embedding(arrays: Arrays) -> None:
    del arrays["model.embed_tokens.weight"]


def fuse_twice(arrays: Arrays) -> None:
    parts = [arrays[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    arrays["model.layers.0.mlp.gate_up_proj.weight"] = np.concatenate(parts)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (change_shape, FileFormatError, "has shape (15, 32), config.json asks for (16, 32)"),
        (add_unknown, UnsupportedError, "weight_scale_inv' has no place in a llama model"),
        (add_twin, FileFormatError, "are one"),
        (quantize, UnsupportedError, "has type U8"),
        (add_dimension, UnsupportedError, "4 dimensions"),
        (drop_embedding, FileFormatError, "'model.embed_tokens.weight' is missing"),
        (fuse_twice, FileFormatError, "both in the checkpoint"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, change: Any, error: type[MartletError], told: str
) -> None:
    folder = copied("llama", tmp_path)
    arrays = stored_arrays(folder)
    change(arrays)
    rewrite(folder, arrays)
    with pytest.raises(error) as refusal:
        weights_of(folder)
    assert told in str(refusal.value)
