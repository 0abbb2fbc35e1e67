"""What a checkpoint's config.json says, checked, as sizes and as metadata of a GGUF file.

Owns: the table of convertible model classes, the defaults of keys a config leaves out, and the
refusal of what no architecture of ours computes. Must not know: tensors, tokenizers, files.

Class names, key names and defaults are those of Hugging Face's `transformers` 5.24; the metadata
keys are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .convert_rope import RopeKeys, positive, rope_keys
from .dense_keys import dense_keys
from .errors import FileFormatError, UnsupportedError

_LOCAL = "sliding_attention"
_LAYER_KINDS = ("full_attention", _LOCAL)


@dataclass(frozen=True)
class Family:
    """Model classes that one `general.architecture` runs, and how their checkpoints differ."""

    arch: str
    activation: str = "silu"
    rope_pairs: bool = False  # rope turns neighbouring dims: rows of q and k change their order
    norm_offset: float = 0.0  # the model adds it to norm weights, the GGUF holds the sum
    head_norm: bool = False  # q and k are normed per head
    sandwich: bool = False  # norms also behind each sub-layer
    biased: tuple[str, ...] = ()  # projections that have a bias whatever the config says
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Family(
    "llama", rope_pairs=True, defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
)
_MISTRAL = Family(
    "llama",
    rope_pairs=True,
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
_QWEN2 = Family(
    "qwen2",
    biased=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
)
_QWEN3 = Family(
    "qwen3",
    head_norm=True,
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": 128},
)
_GEMMA3 = Family(
    "gemma3",
    activation="gelu_pytorch_tanh",
    norm_offset=1.0,
    head_norm=True,
    sandwich=True,
    defaults={
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}

# Keys that change the arithmetic in ways that nothing here implements, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "use_sliding_window": (False,),
    "is_causal": (True,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
}
_MAX_LAYERS = 4096  # a bound on what a hostile file can make us list; readers have the same
_GEMMA3_27B_LAYERS = 62  # this size alone has another query scale; readers know it by its layers


@dataclass(frozen=True)
class Settings:
    """A checked config."""

    family: Family
    n_layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int | None  # None: as many rows as the embedding has
    context: int
    norm_eps: float
    is_tied: bool
    attention_bias: bool
    mlp_bias: bool
    is_local: tuple[bool, ...]  # layers that see only `window` positions
    window: int
    rope: RopeKeys  # of global layers
    local_rope_base: float | None  # of local layers, where it is another one

    @property
    def biased(self) -> tuple[str, ...]:
        """Projections of a layer that have a bias."""
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return (
            self.family.biased
            + attention * (self.attention_bias and not self.family.biased)
            + mlp * self.mlp_bias
        )

    def metadata(self) -> dict[str, Any]:
        """The architecture's keys: int is uint32, float is float32."""
        keys: dict[str, Any] = {
            **dense_keys(
                n_layers=self.n_layers,
                context=self.context,
                dim=self.dim,
                ffn_dim=self.ffn_dim,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                norm_eps=self.norm_eps,
            ),
            **self.rope.metadata,
        }
        if any(self.is_local):
            keys["attention.sliding_window"] = self.window
            if not all(self.is_local):
                keys["attention.sliding_window_pattern"] = list(self.is_local)
        if self.local_rope_base is not None:
            keys["rope.freq_base_swa"] = self.local_rope_base
        return {f"{self.family.arch}.{key}": value for key, value in keys.items()}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Refuses what cannot be converted, naming key and value."""
    family = _family(config)
    inner = config.get("text_config") or {}
    if not isinstance(inner, dict):
        raise FileFormatError("config.json: text_config is not a JSON object")
    # A null takes the place of a default, too: Mistral says so that it has no window.
    values = {**family.defaults, **config, **inner}
    keys = _Config({key: value for key, value in values.items() if value is not None})
    _refuse_unsupported(keys.values, family)
    n_layers, dim = keys.count("num_hidden_layers"), keys.count("hidden_size")
    if n_layers > _MAX_LAYERS:
        raise FileFormatError(
            f"config.json: num_hidden_layers is {n_layers}, at most {_MAX_LAYERS}"
        )
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise FileFormatError(
            f"config.json: {heads} attention heads are not a multiple of {kv_heads} kv heads"
        )
    if "head_dim" not in keys.values and dim % heads:
        raise FileFormatError(f"config.json: {dim} values do not divide into {heads} heads")
    head_dim = keys.count("head_dim", dim // heads)
    if head_dim % 2:
        raise FileFormatError(f"config.json: head_dim is {head_dim}, expected an even number")
    _check_query_scale(keys, family, n_layers, dim // heads, head_dim)
    is_local = _local_layers(keys, family, n_layers)
    context = keys.count("max_position_embeddings")
    return Settings(
        family=family,
        n_layers=n_layers,
        dim=dim,
        ffn_dim=keys.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size") if "vocab_size" in keys.values else None,
        context=context,
        norm_eps=keys.number("rms_norm_eps"),
        is_tied=bool(keys.values.get("tie_word_embeddings", False)),
        attention_bias=bool(keys.values.get("attention_bias", False)),
        mlp_bias=bool(keys.values.get("mlp_bias", False)),
        is_local=is_local,
        window=keys.count("sliding_window") if any(is_local) else 0,
        rope=rope_keys(keys.values, head_dim, context),
        local_rope_base=_local_rope_base(keys) if family is _GEMMA3 else None,
    )


class _Config:
    """Typed access; every refusal names key and value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise FileFormatError(
                f"config.json: {key} is {value!r}, expected a whole number from 1"
            )
        return value

    def number(self, key: str) -> float:
        return positive(key, self.values.get(key))


def _family(config: Mapping[str, Any]) -> Family:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"config.json: architectures is {classes!r}; convertible: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _refuse_unsupported(given: Mapping[str, Any], family: Family) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in given and given[key] not in neutral:
            shown = given[key]
            if key == "quantization_config" and isinstance(shown, dict):
                shown = shown.get("quant_method")
            raise UnsupportedError(f"config.json: {key} is {shown!r}, which is not supported")
    activation = given.get("hidden_activation", given.get("hidden_act", family.activation))
    if activation != family.activation:
        raise UnsupportedError(
            f"config.json: activation {activation!r} is not supported for {family.arch}, "
            f"only {family.activation!r}"
        )


def _check_query_scale(
    keys: _Config, family: Family, n_layers: int, width: int, head_dim: int
) -> None:
    """GGUF has no key for it that other readers of gemma3 honour; they follow this rule."""
    if "query_pre_attn_scalar" not in family.defaults:
        return
    scalar = keys.number("query_pre_attn_scalar")
    expected = width if n_layers == _GEMMA3_27B_LAYERS else head_dim
    if scalar != expected:
        raise UnsupportedError(
            f"config.json: query_pre_attn_scalar is {scalar:g}, only {expected} is supported "
            f"for {n_layers} layers of head_dim {head_dim}"
        )


def _local_layers(keys: _Config, family: Family, n_layers: int) -> tuple[bool, ...]:
    if family is _MISTRAL:
        # A window as long as the context hides nothing.
        context = keys.count("max_position_embeddings")
        return (keys.count("sliding_window", context) < context,) * n_layers
    kinds = keys.values.get("layer_types")
    if kinds is None:
        every = keys.count("sliding_window_pattern") if family is _GEMMA3 else 1
        return tuple((n + 1) % every != 0 for n in range(n_layers))
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise FileFormatError(f"config.json: layer_types does not name {n_layers} layers")
    for kind in kinds:
        if kind not in (_LAYER_KINDS if family is _GEMMA3 else _LAYER_KINDS[:1]):
            raise UnsupportedError(f"config.json: layer type {kind!r} is not supported")
    return tuple(kind == _LOCAL for kind in kinds)


def _local_rope_base(keys: _Config) -> float:
    """Local layers have a base of their own and are never stretched."""
    ropes = keys.values.get("rope_parameters") or {}
    local = ropes.get(_LOCAL) if isinstance(ropes, dict) else None
    if local is None:
        return keys.number("rope_local_base_freq")
    kind = local.get("rope_type", "default") if isinstance(local, dict) else None
    if kind != "default":
        raise UnsupportedError(f"config.json: rope {kind!r} of local layers is not supported")
    return _Config({"rope_theta": 1e4, **local}).number("rope_theta")
