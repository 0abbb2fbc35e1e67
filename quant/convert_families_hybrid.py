"""Rows of classes whose layers mix tokens by a recurrence, and of Granite, of which there are both.

Owns: their keys, defaults and names of tensors, as `transformers` 5.24 has them. Must not know:
config.json's values, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .convert_experts import GROUPED_CHOICE, ExpertKeys
from .convert_family import (
    GATE_UP,
    PARTIAL_ROPE,
    SECTIONED_ROPE,
    SHARED_GATE_UP,
    Family,
    FamilyChoice,
    HeadNorm,
    Nextn,
    Norms,
    base_keys,
)
from .convert_recurrent import ATTENTION, FALCON_SCALES, has_experts

_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_GRANITE_DEFAULTS = base_keys(2048, 1e-6, **dict.fromkeys(_GRANITE_SCALES, 1.0))
_GRANITE = Family(
    "granite",
    rope_pairs=True,
    scales=_GRANITE_SCALES,
    divides_logits=True,
    defaults=_GRANITE_DEFAULTS,
)
_GRANITEMOE = replace(
    _GRANITE,
    arch="granitemoe",
    experts=ExpertKeys(
        count=("num_local_experts",), shared_dim="shared_intermediate_size", normalizes=True
    ),
    renames={
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".shared_mlp.input_linear.": f".{SHARED_GATE_UP}.",
        ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    },
    defaults={
        **_GRANITE_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    },
)
# Granite 4: one class for layers of Mamba-2 with and without experts, and for none of either.
_GRANITE4MOE = replace(
    _GRANITEMOE,
    rope_switch="position_embedding_type",
    defaults={**_GRANITEMOE.defaults, "shared_intermediate_size": 1024},
)
_GRANITE4 = replace(
    _GRANITE,
    rope_switch="position_embedding_type",
    ffn_key="shared_intermediate_size",
    renames={
        ".shared_mlp.input_linear.": f".{GATE_UP}.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
    },
)
_MAMBA2: dict[str, Any] = {"mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True}
_NEMOTRON_MLP = ("up_proj.", "down_proj.", "gate.", "experts.", "shared_experts.")
_DT_BIAS = {".mamba.dt_bias": ".mamba.dt_proj.bias"}


def _with_mamba2(family: Family) -> Family:
    return replace(
        family,
        arch="granitehybrid",
        recurrence="Mamba-2",
        renames={**family.renames, **_DT_BIAS},
        defaults={**family.defaults, **_MAMBA2},
    )


_GRANITEHYBRID, _GRANITEHYBRIDMOE = _with_mamba2(_GRANITE4), _with_mamba2(_GRANITE4MOE)


def _granite4(config: Mapping[str, Any]) -> Family:
    kinds, has_experts = config.get("layer_types"), bool(config.get("num_local_experts", 8))
    if isinstance(kinds, list) and all(kind in ATTENTION for kind in kinds):
        return _GRANITE4MOE if has_experts else _GRANITE4
    return _GRANITEHYBRIDMOE if has_experts else _GRANITEHYBRID


_LFM2_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}
_LFM2 = Family(
    "lfm2",
    head_norm=HeadNorm.HEADS,
    recurrence="short convolution",
    adjusts_ffn=True,
    renames={
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.",
        ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    },
    final_norm="model.embedding_norm",
    eps_key="norm_eps",
    defaults={
        **_LFM2_DEFAULTS,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
)
_LFM2MOE = replace(
    _LFM2,
    arch="lfm2moe",
    adjusts_ffn=False,
    experts=ExpertKeys(
        dim="moe_intermediate_size",
        first="num_dense_layers",
        normalizes=True,
        numbers={"routed_scaling_factor": "expert_weights_scale"},
        fixed={"expert_gating_func": 2},
        neutral={"use_expert_bias": (True,)},
        choice_bias="gate.e_score_correction_bias",
    ),
    defaults={
        **_LFM2_DEFAULTS,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
    },
)
_FALCON_H1 = Family(
    "falcon-h1",
    norms=Norms(before_mlp="pre_ff_layernorm"),
    recurrence="Mamba-2 beside attention",
    biases={},
    renames={".feed_forward.": ".mlp.", **_DT_BIAS},
    final_norm="model.final_layernorm",
    defaults=base_keys(
        8192,
        1e-5,
        num_key_value_heads=8,
        **_MAMBA2,
        mamba_rms_norm=False,
        mamba_norm_before_gate=True,
        **dict.fromkeys(FALCON_SCALES, 1.0),
    ),
)
_NEMOTRON_H = Family(
    "nemotron_h",
    activation="relu2",
    norms=Norms(before_attention="norm", before_mlp=""),
    has_gate=False,
    turns=False,
    recurrence="Mamba-2 in layers of one part",
    other_keys={
        "layers_block_type": "layer_types",
        "hybrid_override_pattern": "layer_types",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "layer_norm_epsilon": "rms_norm_eps",
        "attention_head_dim": "head_dim",
    },
    renames={
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.": "model.",
        **{f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"},
        **{f".mixer.{part}": f".mlp.{part}" for part in _NEMOTRON_MLP},
        ".mixer.": ".mamba.",
        **_DT_BIAS,
    },
    final_norm="model.norm_f",
    defaults=base_keys(
        4096,
        1e-5,
        num_key_value_heads=8,
        head_dim=128,
        **{**_MAMBA2, "mamba_n_groups": 8},
        mamba_d_state=128,
    ),
)
_NEMOTRON_H_MOE = replace(
    _NEMOTRON_H,
    arch="nemotron_h_moe",
    experts=ExpertKeys(
        count=("n_routed_experts",),
        dim="moe_intermediate_size",
        shared_dim="moe_shared_expert_intermediate_size",
        numbers={"n_shared_experts": "expert_shared_count", **GROUPED_CHOICE},
        fixed={"expert_gating_func": 2},
        parts=("", "up_proj", "down_proj"),
        choice_bias="gate.e_score_correction_bias",
    ),
    defaults={
        **_NEMOTRON_H.defaults,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
    },
)


def _nemotron_h(config: Mapping[str, Any]) -> Family:
    return _NEMOTRON_H_MOE if has_experts(_NEMOTRON_H.completed(config)) else _NEMOTRON_H


_QWEN3_5 = Family(
    "qwen35",
    norm_offset=1.0,
    head_norm=HeadNorm.HEADS,
    rope_settings=PARTIAL_ROPE | SECTIONED_ROPE,
    rope_sections=(11, 11, 10),
    recurrence="delta net",
    nextn=Nextn.WRITTEN,
    renames={".linear_attn.dt_bias": ".linear_attn.dt_proj.bias"},
    defaults=base_keys(
        32768, 1e-6, num_key_value_heads=4, head_dim=256, partial_rotary_factor=0.25
    ),
)
_QWEN3_5MOE = replace(
    _QWEN3_5,
    arch="qwen35moe",
    experts=ExpertKeys(
        dim="moe_intermediate_size",
        shared_dim="shared_expert_intermediate_size",
        normalizes=True,
        shared="shared_expert",
        has_shared_gate=True,
    ),
    defaults=base_keys(
        32768,
        1e-6,
        num_key_value_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
)
_QWEN3_NEXT = replace(
    _QWEN3_5MOE,
    arch="qwen3next",
    rope_settings=PARTIAL_ROPE,
    rope_sections=(),
    recurrence="grouped delta net",
    experts=replace(
        _QWEN3_5MOE.experts or ExpertKeys(),
        neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    defaults={
        **_QWEN3_5MOE.defaults,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "full_attention_interval": 4,
    },
)

HYBRIDS: dict[str, FamilyChoice] = {
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITEMOE,
    "GraniteMoeSharedForCausalLM": _GRANITEMOE,
    "GraniteMoeHybridForCausalLM": _granite4,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2MOE,
    "FalconH1ForCausalLM": _FALCON_H1,
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
}
