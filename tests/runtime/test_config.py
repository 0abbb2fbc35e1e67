"""Metadata to ModelConfig: defaults for absent keys, values per layer, refusals by name."""

import math
from typing import Any

import numpy as np
import pytest
from martlet.runtime.config import ARCHITECTURES, ModelConfig
from martlet.runtime.errors import FileFormatError, UnsupportedError
from martlet.runtime.models import RECORDERS
from martlet.runtime.rope import LONG_FACTORS, SHORT_FACTORS, Rope, Yarn

from .tiny import TinyDims, tiny_metadata

DIMS = TinyDims(dim=48, heads=4, head_dim=16, n_layers=8)


def config(arch: str = "llama", *, drop: str = "", **changes: Any) -> ModelConfig:
    """The tiny model's config with keys changed ("__" stands for a dot) or dropped."""
    metadata = tiny_metadata(arch, DIMS)
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = {k: v for k, v in metadata.items() if not (drop and drop in k)}
    return ModelConfig.from_metadata(metadata, {"token_embd.weight": (300, DIMS.dim)})


def test_every_known_architecture_has_a_recorder() -> None:
    assert RECORDERS.keys() == ARCHITECTURES.keys()


def test_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba'.*gemma3.*llama.*qwen2"):
        ModelConfig.from_metadata({"general.architecture": "mamba"}, {})


def test_head_size_is_read_and_defaults_to_dim_over_heads() -> None:
    assert {layer.head_dim for layer in config().layers} == {16}
    plain = config(drop="key_length").layers
    assert {(layer.head_dim, layer.value_dim) for layer in plain} == {(12, 16)}
    assert config().attention_scale == 1 / 4


def test_kv_heads_default_to_heads() -> None:
    assert config(drop="head_count_kv").layers[0].kv_heads == 4


def test_values_per_layer() -> None:
    layers = config(feed_forward_length=np.arange(1, 9)).layers
    assert [layer.ffn_dim for layer in layers] == list(range(1, 9))


def test_rope_defaults() -> None:
    rope = config(drop="freq_base").layers[0].rope
    assert rope == Rope(base=10000.0, n_rot=16, factor=1.0)
    assert config(rope__dimension_count=8).layers[0].rope.n_rot == 8


def test_inverse_frequencies() -> None:
    rope = Rope(base=100.0, n_rot=4, factor=2.0)
    np.testing.assert_allclose(rope.inv_freq(), [0.5, 0.05])
    np.testing.assert_allclose(rope.inv_freq(np.array([1, 5], np.float32)), [0.5, 0.01])
    assert rope.inv_freq().dtype == np.float64


def test_linear_scaling() -> None:
    assert config(rope__scaling__factor=4.0).layers[0].rope.factor == 4
    assert config(rope__scaling__factor=0.0).layers[0].rope.factor == 1
    assert config(rope__scaling__type="none", rope__scaling__factor=4.0).layers[0].rope.factor == 1
    with pytest.raises(UnsupportedError, match=r"'dynamic'.*none, linear, yarn, longrope"):
        config(rope__scaling__type="dynamic")
    with pytest.raises(FileFormatError, match=r"'rope_factors_long\.weight' is missing"):
        config(rope__scaling__type="longrope")


def test_yarn_keeps_fast_dims_and_stretches_slow_ones() -> None:
    rope = config(rope__scaling__type="yarn", rope__scaling__factor=4.0).layers[0].rope
    assert rope.yarn == Yarn(original_context=512)
    ratio = Rope(rope.base, rope.n_rot).inv_freq() / rope.inv_freq()
    # 512 / 2 pi = 81.5 radians: dim 0.8 of 8 turns 32 times, dim 3.8 once
    assert ratio[0] == 1
    assert (np.diff(ratio[:5]) > 0).all()
    np.testing.assert_allclose(ratio[4:], 4)
    assert rope.amplitude == pytest.approx(1 + 0.1 * math.log(4))


def test_gemma3_defaults_of_old_files() -> None:
    c = config("gemma3", drop="pattern", rope__scaling__factor=8.0)
    windows = [layer.window for layer in c.layers]
    assert windows == [20, 20, 20, 20, 20, 0, 20, 20]
    assert c.layers[0].rope == Rope(base=10000.0, n_rot=16, divisors="")
    assert c.layers[5].rope == Rope(base=1e6, n_rot=16, factor=8.0)
    assert c.embedding_scale == math.sqrt(48)


def test_the_27b_gemma3_scales_queries_by_its_width() -> None:
    assert config("gemma3", block_count=62).attention_scale == 1 / math.sqrt(48 / 4)
    assert config("llama", block_count=62).attention_scale == 1 / math.sqrt(16)


@pytest.mark.parametrize(
    ("pattern", "is_local"),
    [(2, [1, 0] * 4), (0, [1] * 8), (1, [0] * 8), ([True, False] * 4, [1, 0] * 4)],
)
def test_window_patterns(pattern: Any, is_local: list[int]) -> None:
    layers = config("gemma3", attention__sliding_window_pattern=pattern).layers
    assert [layer.window for layer in layers] == [20 * local for local in is_local]


def test_sizes_of_local_layers_may_differ() -> None:
    layers = config("gemma3", attention__key_length_swa=8, rope__freq_base_swa=500.0).layers
    assert [layer.head_dim for layer in layers[:2]] == [8, 16]
    assert layers[0].rope == Rope(base=500.0, n_rot=8, divisors="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 0}, r"block_count is 0, expected a whole number from 1"),
        ({"block_count": 10**9}, r"block_count is 1000000000, at most"),
        ({"block_count": "8"}, r"block_count is '8'"),
        ({"attention__head_count": True}, r"head_count is True"),
        ({"attention__head_count": 3}, r"layer 0 has 3 heads, not a multiple of 2 kv_heads"),
        ({"attention__head_count_kv": np.zeros(8, int)}, r"head_count_kv is 0"),
        ({"feed_forward_length": [1, 2]}, r"feed_forward_length has 2 values for 8 layers"),
        ({"rope__dimension_count": 18}, r"dimension_count is 18, expected an even number up to 16"),
        ({"rope__dimension_count": 7}, r"dimension_count is 7"),
        ({"rope__freq_base": math.nan}, r"freq_base is nan, expected a finite number"),
        ({"rope__freq_base": -1.0}, r"freq_base is -1"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, r"rms_epsilon is -1, expected at least 0"),
        ({"rope__scaling__factor": -2.0}, r"scaling.factor is -2"),
        ({"embedding_length": 64}, r"token_embd.weight' has shape \(300, 48\)"),
        ({"attention__sliding_window_pattern": [True]}, r"pattern has 1 values for 8 layers"),
    ],
)
def test_damaged_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "rms_epsilon", "context_length"]
)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(FileFormatError, match=rf"{key}' is missing"):
        config(drop=key)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"nextn_predict_layers": 1}, "prediction"),
        ({"logit_scale": 4.0}, "scaled logits"),
        ({"attention__temperature_scale": 0.1}, "queries scaled by position"),
    ],
)
def test_arithmetic_that_no_op_does_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        config(**changes)
    neutral: dict[str, Any] = dict.fromkeys(changes, 0)
    assert config(**neutral).n_layers == 8


def test_granite_keeps_its_stream_divided_by_the_residual_scale() -> None:
    c = config("granite", residual_scale=0.5, embedding_scale=6.0, logit_scale=8.0)
    assert (c.embedding_scale, c.logit_scale) == (12, 0.125)
    assert c.stream_eps == pytest.approx(4e-6)
    assert c.norm_eps == pytest.approx(1e-6)  # of what is not of the stream
    with pytest.raises(FileFormatError, match="residual_scale is -1"):
        config("granite", residual_scale=-1.0)


def test_ropes_are_switched_off_where_a_file_says_so() -> None:
    assert config("granite").layers[0].rope
    assert not any(c.rope for c in config("granite", rope__scaling__finetuned=False).layers)
    assert all(c.rope for c in config("llama", rope__scaling__finetuned=False).layers)


def test_every_fourth_layer_of_smollm3_has_no_rope() -> None:
    assert [bool(c.rope) for c in config("smollm3").layers] == [True, True, True, False] * 2


def test_global_layers_of_cohere2_have_no_rope() -> None:
    layers = config(
        "cohere2", attention__sliding_window=8, attention__layer_norm_epsilon=1e-5
    ).layers
    assert [(bool(c.rope), c.window) for c in layers] == [(True, 8)] * 3 + [(False, 0)] + [
        (True, 8)
    ] * 3 + [(False, 0)]
    assert all(c.rope for c in config("exaone4").layers), "a model without windows"


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert config("phi3", attention__sliding_window=512).layers[0].window == 0
    assert config("phi3", attention__sliding_window=511).layers[0].window == 511


def test_longrope_is_chosen_by_the_context() -> None:
    metadata = tiny_metadata("phi3", DIMS) | {"phi3.rope.scaling.original_context_length": 128}
    shapes = {"token_embd.weight": (300, DIMS.dim), LONG_FACTORS: (8,), SHORT_FACTORS: (8,)}
    c = ModelConfig.from_metadata(metadata, shapes)
    ropes = [c.at_context(n).layers[0].rope for n in (128, 129)]
    assert [rope and rope.divisors for rope in ropes] == [SHORT_FACTORS, LONG_FACTORS]
    assert ropes[0]
    assert ropes[0].amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


def test_mistral3_cancels_a_part_of_what_yarn_adds() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    c = config("mistral3", **yarn, rope__scaling__yarn_log_multiplier=1.0)
    assert c.layers[0].rope
    assert c.layers[0].rope.amplitude == 1
    hot = config("mistral3", **yarn, attention__temperature_scale=0.1)
    assert (hot.temperature, hot.temperature_span) == (0.1, 512)


def test_gemma2_defaults_of_old_files() -> None:
    c = config("gemma2")
    assert [layer.window for layer in c.layers] == [4096, 0] * 4
    assert (c.attention_cap, c.logit_cap) == (50, 30)
    assert config("gemma2", block_count=46).attention_scale == 1 / math.sqrt(48 / 4)
    bare = config("gemma2", attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    assert (bare.attention_cap, bare.logit_cap) == (0, 0)
    with pytest.raises(FileFormatError, match="final_logit_softcapping is -1"):
        config("gemma2", final_logit_softcapping=-1.0)
