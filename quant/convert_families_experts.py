"""Rows of classes whose every layer, or all but the first, has experts: Qwen, GLM 4.5 and Ling 2.

Owns: their keys, defaults and names of tensors, as `transformers` 5.24 has them, those of Ling 2 as
its own class has them. Must not know: config.json's values, files.
"""

from __future__ import annotations

from typing import Any

from .convert_experts import GROUPED_CHOICE, ExpertKeys
from .convert_family import (
    PARTIAL_ROPE,
    QKV,
    QKV_PARTS,
    Family,
    FamilyChoice,
    HeadNorm,
    Nextn,
    base_keys,
)

_EVERY_LAYER: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
_QWEN2MOE = Family(
    "qwen2moe",
    biased=QKV_PARTS,
    experts=ExpertKeys(
        dim="moe_intermediate_size",
        shared_dim="shared_expert_intermediate_size",
        normalizes=False,
        neutral={**_EVERY_LAYER, "qkv_bias": (True,)},
        shared="shared_expert",
        has_shared_gate=True,
    ),
    defaults=base_keys(
        32768,
        1e-6,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
    ),
)
_QWEN3MOE = Family(
    "qwen3moe",
    head_norm=HeadNorm.HEADS,
    experts=ExpertKeys(dim="moe_intermediate_size", normalizes=True, neutral=_EVERY_LAYER),
    defaults=base_keys(
        32768,
        1e-6,
        num_key_value_heads=4,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
    ),
)
_GLM4MOE = Family(
    "glm4moe",
    rope_settings=PARTIAL_ROPE,
    biases={"attention_bias": QKV_PARTS},
    optional_head_norm="use_qk_norm",
    nextn=Nextn.WRITTEN,
    experts=ExpertKeys(
        count=("n_routed_experts", "num_local_experts"),
        dim="moe_intermediate_size",
        shared_count="n_shared_experts",
        first="first_k_dense_replace",
        numbers=GROUPED_CHOICE,
        fixed={"expert_gating_func": 2},
        choice_bias="gate.e_score_correction_bias",
    ),
    defaults=base_keys(
        131072,
        1e-5,
        num_key_value_heads=8,
        head_dim=128,
        partial_rotary_factor=0.5,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
)
_BAILINGMOE2 = Family(
    "bailingmoe2",
    rope_settings=PARTIAL_ROPE,
    keeps_fused=(QKV,),
    biases={"use_qkv_bias": (QKV,), "use_bias": ("self_attn.o_proj",)},
    head_norm=HeadNorm.HEADS,
    nextn=Nextn.LEFT_OUT,
    experts=ExpertKeys(
        dim="moe_intermediate_size",
        shared_count="num_shared_experts",
        tells_shared_dim=True,
        first="first_k_dense_replace",
        numbers=GROUPED_CHOICE,
        fixed={"expert_gating_func": 2},
        neutral={
            "score_function": ("sigmoid",),
            "moe_router_enable_expert_bias": (True,),
            "use_qk_norm": (True,),
            "use_rmsnorm": (True,),
        },
        choice_bias="gate.e_score_correction_bias",
    ),
    renames={
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.query_key_value.": f".{QKV}.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    },
    defaults=base_keys(
        32768,
        1e-6,
        partial_rotary_factor=0.5,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_shared_experts=1,
        n_group=8,
        topk_group=4,
    ),
)

EXPERT_FAMILIES: dict[str, FamilyChoice] = {
    "Qwen2MoeForCausalLM": _QWEN2MOE,
    "Qwen3MoeForCausalLM": _QWEN3MOE,
    "Glm4MoeForCausalLM": _GLM4MOE,
    "BailingMoeV2ForCausalLM": _BAILINGMOE2,
}
