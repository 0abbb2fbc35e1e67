"""What a model file says about its shape, checked once and frozen.

Owns: sizes per layer, defaults of absent keys, the table of known architectures. Must not know:
ops, plans or the bytes of weights. The recorders in runtime/models read nothing but a
ModelConfig, so "absent in the file" and "per layer or one for all" are settled here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FileFormatError, UnsupportedError
from .experts import ExpertDefaults, Experts, read_experts
from .metadata_keys import Keys
from .rope import Rope, read_rope

_MAX_LAYERS = 4096  # a bound on what a hostile file can make us allocate
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class Architecture:
    """Defaults of one `general.architecture` for keys that files of it may lack."""

    scales_embedding: bool = False  # rows of the embedding are multiplied by sqrt(dim)
    local_every: int = 0  # sliding_window_pattern: layer l is local when l mod n < n - 1
    local_rope_base: float | None = None  # None: the same as on global layers
    experts: ExpertDefaults | None = None  # None: no file has any


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(experts=ExpertDefaults(renormalize=True)),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(experts=ExpertDefaults()),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(experts=ExpertDefaults(renormalize=True)),
    "gemma3": Architecture(scales_embedding=True, local_every=6, local_rope_base=10000.0),
}

# Keys that change the arithmetic in ways that no op implements; a neutral value is no obstacle.
_UNSUPPORTED: dict[str, tuple[str, float]] = {
    "nextn_predict_layers": ("multi-token prediction blocks", 0),
    "attn_logit_softcapping": ("soft-capped attention scores", 0),
    "final_logit_softcapping": ("soft-capped logits", 0),
    "logit_scale": ("scaled logits", 1),
    "residual_scale": ("scaled residuals", 1),
    "rope.scaling.yarn_log_multiplier": ("YaRN with its own logarithm", 0),
}


@dataclass(frozen=True)
class LayerConfig:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    ffn_dim: int
    window: int  # a key is visible when its distance is below this; 0: all keys
    rope: Rope
    experts: Experts | None = None  # None: a dense layer


@dataclass(frozen=True)
class ModelConfig:
    arch: str
    name: str
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    context_train: int
    dim: int
    norm_eps: float
    embedding_scale: float
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    pooling_type: int = 0
    """How a text becomes one vector, as files number it (pooling.py); 0: they do not say."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> ModelConfig:
        """Reads and checks a file's metadata; `shapes` are its tensors' (rows, cols)."""
        arch = metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedError(f"architecture {arch!r} is not supported; supported: {known}")
        keys = Keys(metadata, arch)
        keys.refuse(_UNSUPPORTED)
        dim = keys.count("embedding_length")
        layers = _layers(keys, ARCHITECTURES[arch], dim)
        name = metadata.get("general.name")
        default_scale = math.sqrt(dim) if ARCHITECTURES[arch].scales_embedding else 1.0
        return cls(
            arch=arch,
            name=name if isinstance(name, str) else arch,
            vocab_size=_vocab_size(shapes, dim),
            context_train=keys.count("context_length"),
            dim=dim,
            norm_eps=_norm_eps(keys),
            embedding_scale=keys.number("embedding_scale", default_scale),
            attention_scale=_attention_scale(keys, arch, dim, layers),
            layers=layers,
            pooling_type=keys.count("pooling_type", 0),
        )


def _norm_eps(keys: Keys) -> float:
    key = "attention.layer_norm_rms_epsilon"
    eps = keys.number(key)
    if eps < 0:  # a root of a negative number would make every logit NaN
        raise FileFormatError(f"{keys.arch}.{key} is {eps:g}, expected at least 0")
    return eps


def _attention_scale(keys: Keys, arch: str, dim: int, layers: tuple[LayerConfig, ...]) -> float:
    width = float(layers[0].head_dim)
    if arch == "gemma3" and len(layers) == _GEMMA3_27B_LAYERS:
        width = dim / layers[0].heads  # this size alone was trained with another query scale
    return keys.number("attention.scale", 0.0) or 1.0 / math.sqrt(width)


def _vocab_size(shapes: Mapping[str, tuple[int, ...]], dim: int) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise FileFormatError("tensor 'token_embd.weight' is missing from the file; fetch it again")
    if len(shape) != 2 or shape[1] != dim:
        raise FileFormatError(
            f"tensor 'token_embd.weight' has shape {shape}, expected (vocab_size, {dim})"
        )
    return shape[0]


def _layers(keys: Keys, arch: Architecture, dim: int) -> tuple[LayerConfig, ...]:
    n_layers = keys.count("block_count")
    if n_layers > _MAX_LAYERS:
        raise FileFormatError(f"{keys.arch}.block_count is {n_layers}, at most {_MAX_LAYERS}")
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = keys.per_layer("attention.head_count_kv", n_layers, default=heads)
    ffn_dims = keys.per_layer("feed_forward_length", n_layers)
    windows = _windows(keys, arch, n_layers)
    if arch.experts is None:
        keys.refuse({"expert_count": ("experts", 0)})
    experts = read_experts(keys, arch.experts or ExpertDefaults(), ffn_dims)
    layers = []
    for n, (h, kv, ffn, window) in enumerate(zip(heads, kv_heads, ffn_dims, windows, strict=True)):
        if h % kv:
            raise FileFormatError(f"layer {n} has {h} heads, not a multiple of {kv} kv_heads")
        head_dim = _head_size(keys, "attention.key_length", window, dim, h)
        value_dim = _head_size(keys, "attention.value_length", window, dim, h)
        rope = read_rope(keys, head_dim, local_base=arch.local_rope_base, is_local=window > 0)
        layers.append(LayerConfig(h, kv, head_dim, value_dim, ffn, window, rope, experts[n]))
    return tuple(layers)


def _windows(keys: Keys, arch: Architecture, n_layers: int) -> list[int]:
    """The window of each layer, 0 on global ones."""
    window = keys.count("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern", arch.local_every)
    if isinstance(pattern, list):
        if len(pattern) != n_layers:
            raise FileFormatError(
                f"{keys.arch}.attention.sliding_window_pattern has {len(pattern)} values for "
                f"{n_layers} layers"
            )
        is_local = [bool(value) for value in pattern]
    else:
        every = keys.count("attention.sliding_window_pattern", arch.local_every)
        is_local = [every == 0 or n % every < every - 1 for n in range(n_layers)]
    return [window if local else 0 for local in is_local]


def _head_size(keys: Keys, key: str, window: int, dim: int, heads: int) -> int:
    size = keys.count(key, 0)
    if window:
        size = keys.count(f"{key}_swa", size)
    if not size and dim % heads:
        raise FileFormatError(
            f"{keys.arch}.{key} is absent and {dim} values do not divide into {heads} heads"
        )
    return size or dim // heads
