"""What a model file says about its shape, checked once and frozen.

Owns: sizes per layer, and scales folded where that is exact. Must not know: ops, plans or the bytes
of weights; defaults of absent keys are in architectures.py. The recorders in runtime/models read
nothing but a ModelConfig, so "absent in the file" and "per layer or one for all" are settled here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from .architectures import ARCHITECTURES, Architecture
from .errors import FileFormatError, UnsupportedError
from .experts import ExpertDefaults, Experts, read_experts
from .latent import Latent, read_latent
from .metadata_keys import Keys
from .pooling import DEFAULT, MEAN, RANK
from .recurrence import NO_RECURRENCE, READERS, Recurrence, recurrent_layers
from .rope import LONG_FACTORS, Rope, RopeRules, original_context, read_rope

_MAX_LAYERS = 4096  # a bound on what a hostile file can make us allocate


# Keys that change the arithmetic, what they ask for, and the value that changes nothing. Those that
# an architecture does not list as supported are refused.
RESTRICTED: dict[str, tuple[str, float]] = {
    "nextn_predict_layers": ("multi-token prediction blocks", 0),
    "logit_scale": ("scaled logits", 1),
    "residual_scale": ("scaled residuals", 1),
    "attention.temperature_scale": ("queries scaled by position", 0),
    "moe_latent_size": ("experts of a narrower stream", 0),
    "rope.scaling.yarn_log_multiplier": ("YaRN with its own logarithm", 0),
}

NEXTN_PRODUCT = "blk.{}.nextn.eh_proj.weight"
"""What a block that predicts further tokens has and no layer; without it there is no block."""

Ability: TypeAlias = Literal["generate", "embed", "rank"]


@dataclass(frozen=True)
class LayerConfig:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    ffn_dim: int
    window: int  # a key is visible when its distance is below this; 0: all keys
    rope: Rope | None  # None: positions do not turn queries and keys
    experts: Experts | None = None  # None: a dense layer
    is_recurrent: bool = False  # whatever kv_heads says of attention
    latent: Latent | None = None  # None: keys are not compressed

    @property
    def kv_values(self) -> int:
        """Keys and values that the cache holds of a token."""
        return self.kv_heads * (self.head_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True)
class ModelConfig:
    arch: str
    name: str
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    context_train: int
    dim: int
    norm_eps: float
    stream_eps: float  # the same, of norms of the residual stream
    embedding_scale: float
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    nextn: tuple[LayerConfig, ...] = ()
    """Blocks behind the layers that predict further tokens; () where the file has left them out."""
    pooling_type: int = 0
    """How a text becomes one vector, as files number it (pooling.py); 0: they do not say."""
    is_causal: bool = True  # else rows see those after them, and nothing is generated
    n_readers: int = 0  # the last layers that read the keys of others, and have none
    per_layer_dim: int = 0  # values that each layer gets of a token's own; 0: none
    n_labels: int = 0  # scores that a classifier gives a text; 0: there is none
    is_centered: bool = False  # norms are LayerNorms
    has_sinks: bool = False  # every head has one more score, whose value is 0
    attention_cap: float = 0.0  # scores are cap * tanh(score / cap); 0: as they are
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    temperature: float = 0.0  # queries at position p grow by temperature * ln(1 + p // span)
    temperature_span: int = 0
    recurrence: Recurrence = NO_RECURRENCE  # of layers that are recurrent

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def abilities(self) -> frozenset[Ability]:
        """What texts can be made into."""
        if self.pooling_type == RANK:
            return frozenset({"rank"})
        return frozenset({"generate", "embed"} if self.is_causal else {"embed"})

    @property
    def generates(self) -> bool:
        return "generate" in self.abilities

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
        habits = ARCHITECTURES[arch]
        keys.refuse({key: what for key, what in RESTRICTED.items() if key not in habits.supports})
        dim = keys.count("embedding_length")
        is_causal = keys.flag("attention.causal", habits.is_causal)
        n_nextn = keys.count("nextn_predict_layers", 0)
        blocks = _layers(keys, habits, dim, shapes, is_causal, n_nextn)
        layers, nextn = blocks[: len(blocks) - n_nextn], blocks[len(blocks) - n_nextn :]
        if NEXTN_PRODUCT.format(len(layers)) not in shapes:
            nextn = ()
        n_labels = shapes.get("cls.output.weight", (0,))[0]
        name = metadata.get("general.name")
        default_scale = math.sqrt(dim) if habits.scales_embedding else 1.0
        # The residual stream is kept divided by residual_scale, so that sub-layers add to it as
        # they are: norms divide by its size anyway, and see the same where eps shrinks with it.
        residual_scale = keys.scale("residual_scale")
        norm_eps = _norm_eps(keys, habits)
        logit_scale = keys.scale("logit_scale")
        temperature = keys.number("attention.temperature_scale", 0.0)
        return cls(
            arch=arch,
            name=name if isinstance(name, str) else arch,
            vocab_size=_vocab_size(shapes, dim),
            context_train=keys.count("context_length"),
            dim=dim,
            norm_eps=norm_eps,
            stream_eps=norm_eps / residual_scale**2,
            embedding_scale=keys.number("embedding_scale", default_scale) / residual_scale,
            attention_scale=_attention_scale(keys, habits, dim, layers),
            layers=layers,
            nextn=nextn,
            pooling_type=_pooling_type(keys, is_causal, n_labels),
            is_causal=is_causal,
            n_labels=n_labels,
            n_readers=keys.count("attention.shared_kv_layers", 0),
            per_layer_dim=keys.count("embedding_length_per_layer_input", 0),
            is_centered=habits.is_centered,
            logit_scale=1 / logit_scale if habits.divides_logits else logit_scale,
            has_sinks=habits.has_sinks,
            attention_cap=_cap(keys, "attn_logit_softcapping", habits.attention_cap),
            logit_cap=_cap(keys, "final_logit_softcapping", habits.logit_cap),
            temperature=temperature,
            temperature_span=original_context(keys) if temperature else 0,
            recurrence=READERS[habits.recurrence](keys),
        )

    def at_context(self, n_tokens: int) -> ModelConfig:
        """For sequences of up to so many tokens: some ropes have two lists of factors, and which
        one holds is chosen once, so that a key never depends on what comes after it."""
        layers, nextn = (
            tuple(
                replace(layer, rope=layer.rope and layer.rope.at_context(n_tokens))
                for layer in blocks
            )
            for blocks in (self.layers, self.nextn)
        )
        return replace(self, layers=layers, nextn=nextn)


def _norm_eps(keys: Keys, arch: Architecture) -> float:
    key, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    is_other = arch.has_one_part and keys.get(key, 0) == 0  # as files of Nemotron-H have it
    if arch.is_centered or is_other:
        key = other
    eps = keys.number(key)
    if eps < 0:  # a root of a negative number would make every logit NaN
        raise FileFormatError(f"{keys.arch}.{key} is {eps:g}, expected at least 0")
    return eps


def _cap(keys: Keys, key: str, default: float) -> float:
    cap = keys.number(key, default)
    if cap < 0:
        raise FileFormatError(f"{keys.arch}.{key} is {cap:g}, expected at least 0")
    return cap


def _attention_scale(
    keys: Keys, arch: Architecture, dim: int, layers: tuple[LayerConfig, ...]
) -> float:
    if layers[0].latent:
        return layers[0].latent.scale(keys)
    width = float(layers[0].head_dim)
    if len(layers) == arch.wide_query_layers:
        width = dim / layers[0].heads  # this size alone was trained with another query scale
    return keys.number("attention.scale", arch.attention_scale) or 1.0 / math.sqrt(width)


def _vocab_size(shapes: Mapping[str, tuple[int, ...]], dim: int) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise FileFormatError("tensor 'token_embd.weight' is missing from the file; fetch it again")
    if len(shape) != 2 or shape[1] != dim:
        raise FileFormatError(
            f"tensor 'token_embd.weight' has shape {shape}, expected (vocab_size, {dim})"
        )
    return shape[0]


def _pooling_type(keys: Keys, is_causal: bool, n_labels: int) -> int:
    """What an encoder's file leaves unsaid: scores where it has a classifier, else the mean."""
    default = DEFAULT if is_causal else RANK if n_labels else MEAN
    kind = keys.count("pooling_type", default)
    if kind == RANK and not n_labels:
        raise FileFormatError(
            f"{keys.arch}.pooling_type is {RANK}, but tensor 'cls.output.weight' is missing from "
            "the file; fetch or convert it again"
        )
    return kind


def _layers(
    keys: Keys,
    arch: Architecture,
    dim: int,
    shapes: Mapping[str, tuple[int, ...]],
    is_causal: bool,
    n_nextn: int,
) -> tuple[LayerConfig, ...]:
    """Of every block, the last n_nextn included."""
    n_layers = keys.count("block_count")
    if n_layers > _MAX_LAYERS:
        raise FileFormatError(f"{keys.arch}.block_count is {n_layers}, at most {_MAX_LAYERS}")
    heads = keys.per_layer("attention.head_count", n_layers)
    if n_layers <= n_nextn:
        left = n_layers - n_nextn
        raise FileFormatError(f"{keys.arch}.nextn_predict_layers leaves {left} layers")
    kv_heads = _kv_heads(keys, arch, heads, n_nextn)
    ffn_dims = _ffn_dims(keys, arch, n_layers)
    windows = _windows(keys, arch, n_layers)
    if not is_causal:  # half of a window lies on either side
        if arch.recurrence:
            raise UnsupportedError(f"{keys.arch} without causal attention is not supported")
        windows = [window and window // 2 + 1 for window in windows]
    if arch.experts is None:
        keys.refuse({"expert_count": ("experts", 0)})
    experts = read_experts(keys, arch.experts or ExpertDefaults(), ffn_dims)
    rules = RopeRules(
        arch.local_rope_base,
        arch.plain_local_rope,
        has_two_lists=LONG_FACTORS in shapes,
        grows_queries=arch.is_latent,
        exact_yarn=arch.exact_yarn,
    )
    layers: list[LayerConfig] = []
    for n, (h, kv, ffn, window) in enumerate(zip(heads, kv_heads, ffn_dims, windows, strict=True)):
        if kv and h % kv:
            raise FileFormatError(f"layer {n} has {h} heads, not a multiple of {kv} kv_heads")
        head_dim = _head_size(keys, "attention.key_length", window, dim, h)
        value_dim = _head_size(keys, "attention.value_length", window, dim, h)
        rope, latent = None, None
        if _has_rope(keys, arch, n, window, windows):
            rope = read_rope(keys, head_dim, rules, is_local=window > 0)
        if arch.is_latent:
            latent = read_latent(keys, kv, head_dim, value_dim, rope.n_rot if rope else 0)
        has_mlp = not arch.has_one_part or ffn > 0
        is_recurrent = bool(arch.recurrence) and (kv == 0 or arch.has_both)
        if arch.has_one_part:
            is_recurrent = kv == 0 and not has_mlp
            _check_one_part(n, kv, ffn)
        sizes, chosen = (h, kv, head_dim, value_dim, ffn, window), experts[n] if has_mlp else None
        layers.append(LayerConfig(*sizes, rope, chosen, is_recurrent, latent))
    return tuple(layers)


def _check_one_part(n: int, kv_heads: int, ffn_dim: int) -> None:
    if kv_heads and ffn_dim:
        raise FileFormatError(
            f"layer {n} has {kv_heads} kv_heads and an MLP of {ffn_dim}, expected one of both"
        )


def _ffn_dims(keys: Keys, arch: Architecture, n_layers: int) -> list[int]:
    """Widths of dense layers; files where every layer has experts may leave them out."""
    if arch.has_one_part:
        return keys.per_layer("feed_forward_length", n_layers, least=0)
    if keys.count("expert_count", 0):
        return keys.per_layer("feed_forward_length", n_layers, default=[0] * n_layers, least=0)
    return keys.per_layer("feed_forward_length", n_layers)


def _kv_heads(keys: Keys, arch: Architecture, heads: list[int], n_nextn: int) -> list[int]:
    """0 on layers that are recurrent; blocks that predict further tokens never are."""
    key, n_layers = "attention.head_count_kv", len(heads)
    if not arch.recurrence:
        return keys.per_layer(key, n_layers, default=heads)
    kv_heads = keys.per_layer(key, n_layers, default=heads, least=0)
    recurrent = recurrent_layers(keys, n_layers, arch.attention_every)
    recurrent[n_layers - n_nextn :] = [False] * n_nextn
    return [0 if is_not else n for n, is_not in zip(kv_heads, recurrent, strict=True)]


def _has_rope(keys: Keys, arch: Architecture, n: int, window: int, windows: list[int]) -> bool:
    if arch.has_rope_switch and not keys.get("rope.scaling.finetuned", True):
        return False
    if arch.rope_on_local_only and any(windows):
        return window > 0
    return not arch.no_rope_every or (n + 1) % arch.no_rope_every != 0


def _windows(keys: Keys, arch: Architecture, n_layers: int) -> list[int]:
    """The window of each layer, 0 on global ones."""
    window = keys.count("attention.sliding_window", arch.window)
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
        if arch.global_first and every:
            is_local = [n % every != 0 for n in range(n_layers)]
    if all(is_local) and window >= keys.count("context_length"):
        window = 0  # it hides nothing
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
