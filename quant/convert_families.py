"""The model classes that can be converted, and how the checkpoints of each differ.

Owns: the table and the defaults of keys a config leaves out. Must not know: config.json's values,
tensors, files. Class names, key names and defaults are those of Hugging Face's `transformers` 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from .convert_experts import ExpertKeys
from .convert_recurrent import ATTENTION, FALCON_SCALES


class HeadNorm(Enum):
    """RMS norms of queries and keys."""

    NONE = 0
    HEADS = 1  # of every head, before rope
    WHOLE = 2  # of all heads at once, before rope
    AFTER_ROPE = 3  # of every head, after rope


class Windows(Enum):
    """Which layers see only a window of positions."""

    NEVER = 0
    ALL = 1  # where the config has a window
    LAYERS = 2  # those that layer_types or a pattern name


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms by their place; "": there is none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    def names(self) -> tuple[str, ...]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name)


QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # where they are fused
SHARED_GATE_UP = "mlp.shared_experts.gate_up_proj"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Family:
    """Model classes that one `general.architecture` runs, and how their checkpoints differ."""

    arch: str
    activation: str = "silu"
    activation_aliases: tuple[str, ...] = ()  # other names that the model takes for it
    norms: Norms = Norms()
    is_parallel: bool = False  # attention and MLP read the same rows, both add to the stream
    is_centered: bool = False  # norms are LayerNorms
    norm_offset: float = 0.0  # the model adds it to norm weights, the GGUF holds the sum
    head_norm: HeadNorm = HeadNorm.NONE
    drops_nextn: bool = False  # blocks behind the last layer predict further tokens
    optional_head_norm: str = ""  # a key that says whether every head is normed, before rope
    head_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    rope_pairs: bool = False  # GGUF turns neighbouring dims: rows of q and k change their order
    source_pairs: bool = False  # the model itself turns neighbouring dims
    scales_embedding: bool = False  # by sqrt(dim)
    windows: Windows = Windows.NEVER
    rope_on_local_only: bool = False  # in models with a window, global layers have no rope
    no_rope_every: int = 0  # layer l has no rope when (l + 1) mod n = 0
    plain_local_rope: bool = False  # rope scaling is for global layers alone
    rope_settings: frozenset[str] = frozenset()  # that only some classes know
    keeps_fused: tuple[str, ...] = ()  # tensors that stay fused in the GGUF
    biased: tuple[str, ...] = ()  # projections that have a bias whatever the config says
    biases: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"attention_bias": _ATTENTION, "mlp_bias": _MLP}
    )  # projections that have one where a key says so
    scales: Mapping[str, str] = field(default_factory=dict)  # keys of config.json and of the GGUF
    caps: tuple[str, ...] = ()  # keys of soft caps that the GGUF has under the same name
    divides_logits: bool = False  # by their scale, instead of multiplying
    wide_query_layers: int = 0  # with so many layers the query scale is that of dim / heads
    experts: ExpertKeys | None = None  # None: every layer is dense
    recurrence: str = ""  # of layers without attention: a row of convert_recurrent.READERS
    rope_switch: str = ""  # a key whose value "rope" says that positions turn q and k at all
    ffn_key: str = "intermediate_size"
    adjusts_ffn: bool = False  # it is not yet the width
    renames: Mapping[str, str] = field(default_factory=dict)  # parts of names, to those of others
    final_norm: str = "model.norm"
    eps_key: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def renamed(self, name: str) -> str:
        """A tensor's name with the parts that other families have."""
        for old, new in self.renames.items():
            name = name.replace(old, new)
        return name


def _defaults(context: int, eps: float, **others: Any) -> dict[str, Any]:
    return {"max_position_embeddings": context, "rms_norm_eps": eps, **others}


_PARTIAL = frozenset({"partial_rotary_factor"})
_SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_GELU = "gelu_pytorch_tanh"

_LLAMA = Family("llama", rope_pairs=True, defaults=_defaults(2048, 1e-6))
_MISTRAL = Family(
    "llama",
    rope_pairs=True,
    windows=Windows.ALL,
    defaults=_defaults(131072, 1e-6, num_key_value_heads=8, sliding_window=4096),
)
_QWEN2 = Family("qwen2", biased=_QKV, defaults=_defaults(32768, 1e-6))
_MIXTRAL = Family(
    "llama",
    rope_pairs=True,
    windows=Windows.ALL,
    experts=ExpertKeys(normalizes=True, module="block_sparse_moe", parts=("w1", "w3", "w2")),
    defaults=_defaults(
        131072, 1e-5, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
    ),
)
_EVERY_LAYER: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
_QWEN2MOE = Family(
    "qwen2moe",
    biased=_QKV,
    experts=ExpertKeys(
        dim="moe_intermediate_size",
        shared_dim="shared_expert_intermediate_size",
        normalizes=False,
        neutral={**_EVERY_LAYER, "qkv_bias": (True,)},
        shared="shared_expert",
        has_shared_gate=True,
    ),
    defaults=_defaults(
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
    defaults=_defaults(
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
    rope_settings=_PARTIAL,
    biases={"attention_bias": _QKV},
    optional_head_norm="use_qk_norm",
    drops_nextn=True,
    experts=ExpertKeys(
        count=("n_routed_experts", "num_local_experts"),
        dim="moe_intermediate_size",
        shared_count="n_shared_experts",
        first="first_k_dense_replace",
        numbers={
            "routed_scaling_factor": "expert_weights_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        fixed={"expert_gating_func": 2},
        choice_bias="gate.e_score_correction_bias",
    ),
    defaults=_defaults(
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
_QWEN3 = Family("qwen3", head_norm=HeadNorm.HEADS, defaults=_defaults(32768, 1e-6, head_dim=128))
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
    defaults=_defaults(
        131072,
        1e-6,
        **_GEMMA_SIZES,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    ),
)
_GEMMA = Family(
    "gemma",
    activation=_GELU,
    activation_aliases=("gelu",),
    norm_offset=1.0,
    scales_embedding=True,
    defaults=_defaults(8192, 1e-6, tie_word_embeddings=True, head_dim=256),
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
    defaults=_defaults(
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
    rope_settings=_PARTIAL,
    keeps_fused=(QKV, GATE_UP),
    windows=Windows.ALL,
    defaults=_defaults(4096, 1e-5, original_max_position_embeddings=4096),
)
_SMOLLM3 = Family(
    "smollm3",
    rope_pairs=True,
    no_rope_every=4,
    defaults=_defaults(
        32768, 1e-6, num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4
    ),
)
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_GRANITE_DEFAULTS = _defaults(2048, 1e-6, **dict.fromkeys(_GRANITE_SCALES, 1.0))
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


_MINISTRAL3 = Family(
    "mistral3",
    rope_pairs=True,
    rope_settings=frozenset({"llama_4_scaling_beta"}),
    defaults=_defaults(262144, 1e-5, num_key_value_heads=8, head_dim=128, rope_theta=1e6),
)
_OLMO2 = Family("olmo2", norms=_POST, head_norm=HeadNorm.WHOLE, defaults=_defaults(2048, 1e-5))
_OLMO3 = Family(
    "olmo2",
    norms=_POST,
    head_norm=HeadNorm.WHOLE,
    windows=Windows.LAYERS,
    plain_local_rope=True,
    defaults=_defaults(2048, 1e-5, sliding_window=4096, sliding_window_pattern=4),
)
_EXAONE4 = Family(
    "exaone4",
    norms=_POST,
    head_norm=HeadNorm.HEADS,
    windows=Windows.LAYERS,
    rope_on_local_only=True,
    defaults=_defaults(2048, 1e-5, sliding_window_pattern=4),
)
_HUNYUAN = Family(
    "hunyuan-dense",
    head_norm=HeadNorm.AFTER_ROPE,
    head_norm_names=("self_attn.query_layernorm", "self_attn.key_layernorm"),
    rope_settings=frozenset({"alpha"}),
    defaults=_defaults(2048, 1e-5),
)
_GLM4 = Family(
    "glm4",
    norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    source_pairs=True,
    rope_settings=_PARTIAL,
    keeps_fused=(GATE_UP,),
    biases={"attention_bias": _QKV},
    defaults=_defaults(
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
    biases={"use_bias": _ATTENTION + _MLP},
    defaults=_defaults(131072, 1e-5, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True),
)
_ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    source_pairs=True,
    biases={"use_bias": _ATTENTION + _MLP},
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
    defaults=_defaults(
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
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
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
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
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
    defaults=_defaults(
        8192,
        1e-5,
        num_key_value_heads=8,
        **_MAMBA2,
        mamba_rms_norm=False,
        mamba_norm_before_gate=True,
        **dict.fromkeys(FALCON_SCALES, 1.0),
    ),
)
_QWEN3_5 = Family(
    "qwen35",
    norm_offset=1.0,
    head_norm=HeadNorm.HEADS,
    rope_settings=_PARTIAL,
    recurrence="delta net",
    renames={".linear_attn.dt_bias": ".linear_attn.dt_proj.bias"},
    defaults=_defaults(
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
    defaults=_defaults(
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

FAMILIES: dict[str, Family | Callable[[Mapping[str, Any]], Family]] = {
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": _QWEN2MOE,
    "Qwen3MoeForCausalLM": _QWEN3MOE,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Phi3ForCausalLM": _PHI3,
    "SmolLM3ForCausalLM": _SMOLLM3,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITEMOE,
    "GraniteMoeSharedForCausalLM": _GRANITEMOE,
    "GraniteMoeHybridForCausalLM": _granite4,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO3,
    "Exaone4ForCausalLM": _EXAONE4,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "Glm4ForCausalLM": _GLM4,
    "Glm4MoeForCausalLM": _GLM4MOE,
    "Ernie4_5ForCausalLM": _ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": _ERNIE4_5_MOE,
    "Cohere2ForCausalLM": _COHERE2,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2MOE,
    "FalconH1ForCausalLM": _FALCON_H1,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5MOE,
}


def family_of(name: str, config: Mapping[str, Any]) -> Family:
    """Of a class that is in FAMILIES; some classes are several architectures."""
    found = FAMILIES[name]
    return found if isinstance(found, Family) else found(config)
