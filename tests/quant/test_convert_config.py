"""config.json as metadata: both spellings, defaults that files leave out, refusals by name."""

import math
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert_config import FAMILIES, read_settings
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
# As the 4B file has it: all else is the class's default.
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def metadata(**changes: Any) -> dict[str, Any]:
    return read_settings({**LLAMA, **changes}).metadata()


def test_sizes_of_a_llama() -> None:
    assert metadata() == {
        "llama.block_count": 3,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
    }


def test_a_head_size_of_its_own() -> None:
    # B20: hidden 48 in 4 heads of 16, not of 12.
    found = metadata(hidden_size=48, head_dim=16)
    assert found["llama.attention.key_length"] == found["llama.rope.dimension_count"] == 16


def test_gemma_leaves_most_to_its_class() -> None:
    found = read_settings(GEMMA_4B).metadata()
    assert found["gemma3.attention.head_count"] == 8
    assert found["gemma3.attention.head_count_kv"] == 4
    assert found["gemma3.attention.key_length"] == 256
    assert found["gemma3.attention.sliding_window"] == 1024
    pattern = found["gemma3.attention.sliding_window_pattern"]
    assert [n for n, is_local in enumerate(pattern) if not is_local] == [5, 11, 17, 23, 29]
    assert found["gemma3.rope.freq_base"] == 1e6
    assert found["gemma3.rope.freq_base_swa"] == 1e4
    assert found["gemma3.rope.scaling.factor"] == 8
    assert read_settings(GEMMA_4B).is_tied


def test_both_spellings_of_gemma_say_the_same() -> None:
    inner = {k: v for k, v in GEMMA_4B["text_config"].items() if k != "rope_scaling"}  # type: ignore[attr-defined]
    inner["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    inner["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + [
        "sliding_attention"
    ] * 4
    newer = read_settings({**GEMMA_4B, "text_config": inner})
    assert newer.metadata() == read_settings(GEMMA_4B).metadata()


@pytest.mark.parametrize(
    ("window", "expected"), [(32, 32), (None, None), (128, None), (4096, None)]
)
def test_the_window_of_mistral(window: int | None, expected: int | None) -> None:
    found = metadata(architectures=["MistralForCausalLM"], sliding_window=window)
    assert found.get("llama.attention.sliding_window") == expected
    assert "llama.attention.sliding_window_pattern" not in found


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_linear_scaling(key: str) -> None:
    # The old spelling has "type", and the base beside it.
    rope = {"type": "linear", "factor": 4.0} if key == "rope_scaling" else {
        "rope_type": "linear", "factor": 4.0, "rope_theta": 5e5
    }  # fmt: skip
    found = metadata(**{key: rope}, rope_theta=5e5)
    assert found["llama.rope.scaling.type"] == "linear"
    assert found["llama.rope.scaling.factor"] == 4
    assert found["llama.rope.freq_base"] == 5e5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GROWTH = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("more", "amplitude"),
    [
        ({}, None),
        ({"attention_factor": 1.25}, 1.25 / GROWTH),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1 / GROWTH),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, (0.07 * math.log(4) + 1) / GROWTH**2),
    ],
)
def test_yarn(more: dict[str, float], amplitude: float | None) -> None:
    found = metadata(rope_scaling={**YARN, **more})
    assert found["llama.rope.scaling.original_context_length"] == 32
    assert found["llama.rope.scaling.yarn_beta_fast"] == 32
    assert found.get("llama.rope.scaling.attn_factor") == pytest.approx(amplitude)


def test_llama3_scaling_becomes_divisors() -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    settings = read_settings({**LLAMA, "head_dim": 64, "rope_theta": 5e5, "rope_scaling": rope})
    divisors = settings.rope.tensors["rope_freqs.weight"]
    assert divisors.shape == (32,)
    assert divisors[0] == 1
    assert divisors[-1] == 8
    assert np.all(np.diff(divisors) >= 0)
    assert "llama.rope.scaling.type" not in settings.metadata()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 5.0}}, "alpha is 5.0"),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is 0.1"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention", "x"]}, "'linear_attention'"),
        ({"num_experts": 8}, "num_experts is 8"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        read_settings({**LLAMA, **changes})
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, at most 4096"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"hidden_size": 66}, "66 values do not divide into 4 heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1e39}, "rope_theta of rope is 1e+39"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor of rope is None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "long_factor of rope does not name 8"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 7}}, "long_factor"),
        ({"rope_scaling": "yarn"}, "rope settings are 'yarn'"),
        ({"rope_parameters": {"full_attention": "yarn"}}, "rope settings are 'yarn'"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_damaged_values_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FileFormatError) as refusal:
        read_settings({**LLAMA, **changes})
    assert told in str(refusal.value)


def test_gemma_with_another_query_scale_is_refused() -> None:
    inner = {**GEMMA_4B["text_config"], "query_pre_attn_scalar": 168}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match="query_pre_attn_scalar is 168"):
        read_settings({**GEMMA_4B, "text_config": inner})


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_config_of_any_class_ends_in_one_of_our_errors(name: str) -> None:
    with pytest.raises(MartletError, match="num_hidden_layers"):
        read_settings({"architectures": [name]})


def of_class(name: str, **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [name], **changes}


def test_a_pattern_of_layers_without_rope_that_readers_do_not_follow_is_refused() -> None:
    name = "SmolLM3ForCausalLM"
    assert read_settings(of_class(name, no_rope_layers=[1, 1, 1])).has_rope(2)
    for changes in ({"no_rope_layers": [1, 0, 1]}, {"no_rope_layer_interval": 3}):
        with pytest.raises(UnsupportedError, match="no_rope_layers"):
            read_settings(of_class(name, **changes))


def test_windows_that_leave_no_layer_with_rope_are_refused() -> None:
    name, full = "Exaone4ForCausalLM", ["full_attention"] * 3
    assert read_settings(of_class(name, layer_types=full)).has_rope(0)
    with pytest.raises(UnsupportedError, match="sliding_window without a local layer"):
        read_settings(of_class(name, layer_types=full, sliding_window=8))


def test_a_period_of_letters_names_local_layers() -> None:
    found = read_settings(
        of_class("Exaone4ForCausalLM", sliding_window=8, sliding_window_pattern="LG")
    )
    assert found.is_local == (True, False, True)


def test_the_alpha_of_hunyuan_is_another_base() -> None:
    rope = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4}
    found = read_settings(of_class("HunYuanDenseV1ForCausalLM", rope_parameters=rope)).metadata()
    assert found["hunyuan-dense.rope.freq_base"] == pytest.approx(1e4 * 50 ** (16 / 14))
    assert "hunyuan-dense.rope.scaling.type" not in found


def test_the_temperature_of_ministral_and_what_its_yarn_cancels() -> None:
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    found = read_settings(of_class("Ministral3ForCausalLM", rope_parameters=rope)).metadata()
    assert found["mistral3.attention.temperature_scale"] == 0.1
    assert found["mistral3.rope.scaling.yarn_log_multiplier"] == 1
    assert "mistral3.rope.scaling.attn_factor" not in found


def test_caps_that_are_null_are_none_and_others_are_kept() -> None:
    changes = {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "head_dim": 16}
    found = read_settings(
        of_class("Gemma2ForCausalLM", **changes, attn_logit_softcapping=None)
    ).metadata()
    assert found["gemma2.attn_logit_softcapping"] == 0
    assert found["gemma2.final_logit_softcapping"] == 30
    with pytest.raises(UnsupportedError, match="attn_logit_softcapping is 50"):
        metadata(attn_logit_softcapping=50.0)
