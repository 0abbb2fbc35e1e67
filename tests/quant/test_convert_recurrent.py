"""Recurrent layers of checkpoints: what configs say of them, and what is refused."""

import json
from typing import Any

import pytest
from martlet.quant.convert_config import Settings, read_settings
from martlet.quant.errors import FileFormatError, UnsupportedError

from ..recorded import RECORDED


def settings(name: str, **changes: Any) -> Settings:
    config = json.loads((RECORDED / name / "config.json").read_text())
    return read_settings({**config, **changes})


def test_sizes_of_mamba2() -> None:
    said = settings("granitehybrid").metadata()
    sizes = {key.removeprefix("granitehybrid.ssm."): said[key] for key in said if ".ssm." in key}
    assert sizes == {
        "conv_kernel": 4,
        "group_count": 2,
        "time_step_rank": 4,
        "state_size": 24,
        "inner_size": 64,
    }
    assert said["granitehybrid.attention.head_count_kv"] == [0, 2, 0]
    assert said["granitehybrid.rope.scaling.finetuned"] is False
    whole = settings("granitehybrid", mamba_d_head="auto").recurrence
    assert whole is not None
    assert whole.metadata["ssm.inner_size"] == 64


def test_granite_4_is_the_architecture_that_its_layers_make() -> None:
    assert settings("granitehybrid").family.arch == "granitehybrid"
    assert settings("granitehybrid", num_local_experts=0).experts is None
    attention = {"layer_types": ["attention"] * 3}  # as earlier releases of transformers name it
    assert settings("granitehybrid", **attention).family.arch == "granitemoe"
    assert settings("granite4").family.arch == "granite"


def test_an_interval_says_which_layers_of_qwen3_next_have_attention() -> None:
    listed, counted = settings("qwen3next"), settings("qwen3next", layer_types=None)
    assert listed.metadata()["qwen3next.attention.recurrent_layers"] == [True, False]
    fourth = counted.metadata() | {"qwen3next.attention.recurrent_layers": [True, False]}
    assert fourth == listed.metadata()
    assert counted.recurrence is not None
    assert [layer.has_attention for layer in counted.recurrence.layers] == [False, False]
    every = settings("qwen3next", layer_types=None, full_attention_interval=2)
    assert every.metadata() == listed.metadata()


def test_a_letter_for_each_layer_says_what_a_list_says() -> None:
    listed = settings("nemotron_h")
    lettered = settings("nemotron_h", layers_block_type=None, hybrid_override_pattern="M-*M-")
    assert lettered.metadata() == listed.metadata()
    said = listed.metadata()
    assert said["nemotron_h.feed_forward_length"] == [0, 96, 0, 0, 96]
    assert said["nemotron_h.attention.head_count_kv"] == [0, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("name", "changes", "error", "told"),
    [
        ("granitehybrid", {"mamba_n_groups": 3}, FileFormatError, "4 heads of Mamba-2 in 3 groups"),
        ("granitehybrid", {"mamba_proj_bias": True}, UnsupportedError, "mamba_proj_bias is True"),
        ("granitehybrid", {"time_step_limit": [0.0, 1.0]}, UnsupportedError, "time_step_limit"),
        ("granitehybrid", {"mamba_d_state": 0}, FileFormatError, "mamba_d_state is 0"),
        ("granitehybrid", {"layer_types": ["moe"] * 3}, UnsupportedError, "layer type 'moe'"),
        ("granitehybrid", {"layer_types": ["mamba"]}, FileFormatError, "does not name 3 layers"),
        ("falcon-h1", {"mamba_norm_before_gate": True}, UnsupportedError, "before_gate is True"),
        ("falcon-h1", {"tie_word_embeddings": True}, UnsupportedError, "lm_head_multiplier"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, FileFormatError, "expected 5 numbers"),
        ("falcon-h1", {"key_multiplier": 0}, FileFormatError, "key_multiplier is 0"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, UnsupportedError, "layer type 'conv'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, UnsupportedError, "mlp_hidden_act is 'silu'"),
        ("nemotron_h", {"layers_block_type": []}, FileFormatError, "num_hidden_layers is 0"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, UnsupportedError, "moe_latent_size is 16"),
        ("nemotron_h_moe", {"layers_block_type": ["moe", "mlp"]}, UnsupportedError, "beside moe"),
        ("lfm2", {"conv_bias": True}, UnsupportedError, "conv_bias is true"),
        ("qwen35", {"linear_num_value_heads": 3}, UnsupportedError, "3 value heads"),
        ("lfm2moe", {"use_expert_bias": False}, UnsupportedError, "use_expert_bias is False"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        settings(name, **changes)
