"""The model classes that can be converted, and how the checkpoints of each differ.

Owns: the table and the defaults of keys a config leaves out. Must not know: config.json's values,
tensors, files. Class names, key names and defaults are those of Hugging Face's `transformers` 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .convert_experts import ExpertKeys
from .convert_families_encoder import ENCODERS
from .convert_families_experts import EXPERT_FAMILIES
from .convert_families_hybrid import HYBRIDS
from .convert_families_latent import LATENT_FAMILIES
from .convert_family import (
    ATTENTION_PARTS,
    GATE_UP,
    MLP_PARTS,
    PARTIAL_ROPE,
    QKV,
    QKV_PARTS,
    SECTIONED_ROPE,
    Family,
    FamilyChoice,
    HeadNorm,
    Norms,
    Windows,
    base_keys,
)
from .convert_gemma4 import GGUF_NAMES

_SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_GELU = "gelu_pytorch_tanh"

_LLAMA = Family("llama", rope_pairs=True, defaults=base_keys(2048, 1e-6))
_MISTRAL = Family(
    "llama",
    rope_pairs=True,
    windows=Windows.ALL,
    defaults=base_keys(131072, 1e-6, num_key_value_heads=8, sliding_window=4096),
)
_QWEN2 = Family("qwen2", biased=QKV_PARTS, defaults=base_keys(32768, 1e-6))
_QWEN2VL = replace(_QWEN2, arch="qwen2vl", rope_settings=SECTIONED_ROPE, rope_sections=(16, 24, 24))
_MIXTRAL = Family(
    "llama",
    rope_pairs=True,
    windows=Windows.ALL,
    experts=ExpertKeys(normalizes=True, module="block_sparse_moe", parts=("w1", "w3", "w2")),
    defaults=base_keys(
        131072, 1e-5, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
    ),
)
_GPT_OSS = Family(
    "gpt-oss",
    windows=Windows.LAYERS,
    rope_settings=frozenset({"truncate"}),
    has_sinks=True,
    experts=ExpertKeys(
        count=("num_local_experts", "num_experts"),
        dim="intermediate_size",
        normalizes=True,
        has_bias=True,
        takes_turns=True,
        neutral={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ),
    renames={".mlp.router.": ".mlp.gate.", ".self_attn.sinks": ".self_attn.sinks.weight"},
    defaults=base_keys(
        131072,
        1e-5,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        sliding_window_pattern=2,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        attention_bias=True,
    ),
)
_QWEN3 = Family("qwen3", head_norm=HeadNorm.HEADS, defaults=base_keys(32768, 1e-6, head_dim=128))
_QWEN3VL = replace(
    _QWEN3,
    arch="qwen3vl",
    has_deepstack=True,
    rope_settings=SECTIONED_ROPE,
    rope_sections=(24, 20, 20),
    defaults={**_QWEN3.defaults, "rope_theta": 500000.0},
)
_GEMMA_SIZES: dict[str, Any] = {
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    "gemma3",
    activation=_GELU,
    norms=_SANDWICH,
    norm_offset=1.0,
    head_norm=HeadNorm.HEADS,
    scales_embedding=True,
    windows=Windows.LAYERS,
    plain_local_rope=True,
    wide_query_layers=62,
    defaults=base_keys(
        131072,
        1e-6,
        **_GEMMA_SIZES,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    ),
)
_GEMMA_EMBEDDING = replace(_GEMMA3, arch="gemma-embedding", is_causal=False, wide_query_layers=0)
_GEMMA4 = Family(
    "gemma4",
    activation=_GELU,
    is_layered=True,
    scales_embedding=True,
    windows=Windows.LAYERS,
    plain_local_rope=True,
    caps=("final_logit_softcapping",),
    own_names=GGUF_NAMES,
    defaults=base_keys(
        131072,
        1e-6,
        tie_word_embeddings=True,
        sliding_window=512,
        sliding_window_pattern=6,
        num_key_value_heads=4,
        head_dim=256,
    ),
)
_GEMMA = Family(
    "gemma",
    activation=_GELU,
    activation_aliases=("gelu",),
    norm_offset=1.0,
    scales_embedding=True,
    defaults=base_keys(8192, 1e-6, tie_word_embeddings=True, head_dim=256),
)
_GEMMA2 = Family(
    "gemma2",
    activation=_GELU,
    norms=_SANDWICH,
    norm_offset=1.0,
    scales_embedding=True,
    windows=Windows.LAYERS,
    wide_query_layers=46,
    caps=("attn_logit_softcapping", "final_logit_softcapping"),
    defaults=base_keys(
        8192,
        1e-6,
        **_GEMMA_SIZES,
        sliding_window_pattern=2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
)
_PHI3 = Family(
    "phi3",
    rope_settings=PARTIAL_ROPE,
    keeps_fused=(QKV, GATE_UP),
    windows=Windows.ALL,
    defaults=base_keys(4096, 1e-5, original_max_position_embeddings=4096),
)
_SMOLLM3 = Family(
    "smollm3",
    rope_pairs=True,
    no_rope_every=4,
    defaults=base_keys(
        32768, 1e-6, num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4
    ),
)
_MINISTRAL3 = Family(
    "mistral3",
    rope_pairs=True,
    rope_settings=frozenset({"llama_4_scaling_beta"}),
    defaults=base_keys(262144, 1e-5, num_key_value_heads=8, head_dim=128, rope_theta=1e6),
)
_OLMO2 = Family("olmo2", norms=_POST, head_norm=HeadNorm.WHOLE, defaults=base_keys(2048, 1e-5))
_OLMO3 = Family(
    "olmo2",
    norms=_POST,
    head_norm=HeadNorm.WHOLE,
    windows=Windows.LAYERS,
    plain_local_rope=True,
    defaults=base_keys(2048, 1e-5, sliding_window=4096, sliding_window_pattern=4),
)
_EXAONE4 = Family(
    "exaone4",
    norms=_POST,
    head_norm=HeadNorm.HEADS,
    windows=Windows.LAYERS,
    rope_on_local_only=True,
    defaults=base_keys(2048, 1e-5, sliding_window_pattern=4),
)
_HUNYUAN = Family(
    "hunyuan-dense",
    head_norm=HeadNorm.AFTER_ROPE,
    head_norm_names=("self_attn.query_layernorm", "self_attn.key_layernorm"),
    rope_settings=frozenset({"alpha"}),
    defaults=base_keys(2048, 1e-5),
)
_GLM4 = Family(
    "glm4",
    norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    source_pairs=True,
    rope_settings=PARTIAL_ROPE,
    keeps_fused=(GATE_UP,),
    biases={"attention_bias": QKV_PARTS},
    defaults=base_keys(
        131072,
        1.5625e-7,
        num_key_value_heads=2,
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
)
_ERNIE4_5 = Family(
    "ernie4_5",
    source_pairs=True,
    biases={"use_bias": ATTENTION_PARTS + MLP_PARTS},
    defaults=base_keys(131072, 1e-5, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True),
)
_ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    source_pairs=True,
    biases={"use_bias": ATTENTION_PARTS + MLP_PARTS},
    experts=ExpertKeys(
        count=("moe_num_experts",),
        used="moe_k",
        dim="moe_intermediate_size",
        shared_count="moe_num_shared_experts",
        tells_shared_dim=True,
        first="moe_layer_start_index",
        every="moe_layer_interval",
        normalizes=True,
        neutral={"use_bias": (False,)},
        choice_bias="moe_statics.e_score_correction_bias",
    ),
    defaults=base_keys(
        131072,
        1e-5,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_interval=1,
    ),
)
_COHERE2 = Family(
    "cohere2",
    norms=Norms(before_mlp=""),
    is_parallel=True,
    is_centered=True,
    eps_key="layer_norm_eps",
    source_pairs=True,
    windows=Windows.LAYERS,
    rope_on_local_only=True,
    scales={"logit_scale": "logit_scale"},
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)

FAMILIES: dict[str, FamilyChoice] = {
    **ENCODERS,
    **HYBRIDS,
    **LATENT_FAMILIES,
    **EXPERT_FAMILIES,
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2VL,
    "Qwen3VLForConditionalGeneration": _QWEN3VL,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma3TextModel": _GEMMA_EMBEDDING,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Phi3ForCausalLM": _PHI3,
    "GptOssForCausalLM": _GPT_OSS,
    "SmolLM3ForCausalLM": _SMOLLM3,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO3,
    "Exaone4ForCausalLM": _EXAONE4,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "Glm4ForCausalLM": _GLM4,
    "Ernie4_5ForCausalLM": _ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": _ERNIE4_5_MOE,
    "Cohere2ForCausalLM": _COHERE2,
}


def family_of(name: str, config: Mapping[str, Any]) -> Family:
    """Of a class that is in FAMILIES; some classes are several architectures."""
    found = FAMILIES[name]
    return found if isinstance(found, Family) else found(config)
