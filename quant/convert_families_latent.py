"""Rows of classes with latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, Youtu.

Owns: their keys and defaults, as `transformers` 5.24 has them. Must not know: config.json's values,
files.
"""

from __future__ import annotations

from dataclasses import replace

from .convert_experts import GROUPED_CHOICE, ExpertKeys
from .convert_family import Family, FamilyChoice, Nextn, base_keys

_BIASED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj")
_LATENT = base_keys(
    4096,
    1e-6,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
)
_EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
_EXPERT_KEYS = ExpertKeys(
    count=("n_routed_experts", "num_local_experts", "num_experts"),
    dim="moe_intermediate_size",
    shared_count="n_shared_experts",
    first="first_k_dense_replace",
    layer_kinds="mlp_layer_types",
    numbers=GROUPED_CHOICE,
    fixed={"expert_gating_func": 2},
    neutral={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
    choice_bias="gate.e_score_correction_bias",
)
_V3 = Family(
    "deepseek2",
    is_latent=True,
    source_pairs=True,
    nextn=Nextn.WRITTEN,
    biases={"attention_bias": _BIASED},
    experts=_EXPERT_KEYS,
    defaults={
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
)
_GLM4_MOE_LITE = replace(
    _V3,
    defaults={
        **_V3.defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
)
# Groups of V2 are chosen by their best expert alone, which no reader of its files does.
_V2 = replace(
    _V3,
    experts=replace(
        _EXPERT_KEYS,
        normalizes=False,
        numbers={"routed_scaling_factor": "expert_weights_scale"},
        fixed={"expert_gating_func": 1},
        neutral={
            "topk_method": ("greedy",),
            "scoring_func": ("softmax",),
            "moe_layer_freq": (1,),
            "n_group": (1,),
        },
        choice_bias="",
    ),
    defaults={
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
)
_YOUTU = replace(
    _V3,
    experts=None,
    defaults={**_LATENT, "max_position_embeddings": 131072, "tie_word_embeddings": True},
)

LATENT_FAMILIES: dict[str, FamilyChoice] = {
    "DeepseekV2ForCausalLM": _V2,
    "DeepseekV3ForCausalLM": _V3,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
    "YoutuForCausalLM": _YOUTU,
}
