"""Latent attention of a checkpoint: what configs say, what is refused, and kv_b_proj by heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.convert_config import read_settings
from martlet.quant.convert_latent import SourceLatent, split_heads
from martlet.quant.errors import UnsupportedError
from martlet.quant.safetensors_file import SourceTensor

LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}
FLASH = {**LITE, "architectures": ["Glm4MoeLiteForCausalLM"], "n_shared_experts": 1}
FLASH.pop("first_k_dense_replace")
FLASH.pop("q_lora_rank")
YOUTU = {**LITE, "architectures": ["YoutuForCausalLM"]}


def said(config: dict[str, Any]) -> dict[str, Any]:
    found = read_settings(config).metadata()
    return {key.removeprefix("deepseek2."): value for key, value in found.items()}


def test_sizes_are_those_of_compressed_keys() -> None:
    keys = said(LITE)
    assert (keys["attention.head_count"], keys["attention.head_count_kv"]) == (16, 1)
    assert (keys["attention.key_length"], keys["attention.value_length"]) == (576, 512)
    assert (keys["attention.key_length_mla"], keys["attention.value_length_mla"]) == (192, 128)
    assert (keys["attention.kv_lora_rank"], keys["attention.q_lora_rank"]) == (512, 0)
    assert keys["rope.dimension_count"] == 64
    assert said(FLASH)["attention.q_lora_rank"] == 768


def test_experts_of_each_class() -> None:
    lite, flash = said(LITE), said({**FLASH, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25})
    assert (lite["expert_gating_func"], flash["expert_gating_func"]) == (1, 2)
    assert lite["leading_dense_block_count"] == 1
    assert flash["leading_dense_block_count"] == 2
    assert (lite["expert_shared_count"], flash["expert_shared_count"]) == (2, 1)
    assert flash["expert_weights_scale"] == pytest.approx(1.8)
    assert "expert_weights_norm" not in lite
    assert flash["expert_weights_norm"] is True


def test_a_dense_model_says_so_in_the_keys_that_others_ask_for() -> None:
    keys = said({**YOUTU, "num_hidden_layers": 4})
    assert keys["leading_dense_block_count"] == 4
    assert (keys["expert_feed_forward_length"], keys["expert_shared_count"]) == (10944, 0)


def test_the_growth_of_yarn_goes_into_one_key() -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    keys = said({**LITE, "rope_scaling": {**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}})
    assert keys["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707)
    assert "rope.scaling.attn_factor" not in keys
    other = said({**LITE, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}})
    grown = [1 + 0.1 * m * np.log(40) for m in (1.0, 0.5)]
    assert other["rope.scaling.attn_factor"] == pytest.approx(grown[0] / grown[1])
    assert "rope.scaling.yarn_log_multiplier" not in said({**LITE, "rope_scaling": yarn})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LITE, {"topk_method": "group_limited_greedy"}, "topk_method"),
        (LITE, {"n_group": 8}, "n_group is 8"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (FLASH, {"scoring_func": "softmax"}, "scoring_func"),
        (FLASH, {"rope_interleave": False}, "rope_interleave is false"),
        (FLASH, {"mlp_layer_types": ["sparse", "dense"] * 13 + ["sparse"]}, "mlp_layer_types"),
        (YOUTU, {"num_experts": 8}, "num_experts"),
    ],
)
def test_what_readers_would_compute_otherwise_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_settings({**config, **changes})


def test_rows_of_keys_are_transposed_head_by_head_and_those_of_values_are_not() -> None:
    latent = SourceLatent(rank=5, q_rank=0, heads=3, key_dim=2, n_rot=4, value_dim=4)
    values = np.arange(3 * 6 * 5, dtype=np.float32).reshape(18, 5)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    stored = SourceTensor(name, "F32", (18, 5), Path("x"), values.reshape(-1).view(np.uint8))
    found = split_heads({name: stored, "other": stored}, latent)
    assert found["other"] is stored
    k, v = (found[f"model.layers.0.self_attn.{part}_b_proj.weight"] for part in "kv")
    by_head = values.reshape(3, 6, 5)
    expected = {"k": by_head[:, :2].transpose(0, 2, 1), "v": by_head[:, 2:]}
    for part, whole in ((k, expected["k"]), (v, expected["v"])):
        assert part.shape == whole.shape
        rows = whole.reshape(-1, whole.shape[2])
        for start, stop in ((0, part.n_rows), (1, 3), (4, 11), (part.n_rows - 1, part.n_rows)):
            np.testing.assert_array_equal(part.rows(slice(start, stop)), rows[start:stop])
