"""Recurrent layers of checkpoints: their parts, sizes and metadata, and what changes on the way.

Owns: names and keys of short convolutions (LFM2), gated delta nets (Qwen 3.5, Qwen3-Next) and
Mamba-2 layers, as `transformers` 5.24 has them. Must not know: files, tokenizers, layers with
attention.

A delta net's value heads stand in groups, those of one key head side by side. Those of Qwen 3.5 are
tiled in a GGUF file, head h of v belonging to key head h mod k_heads: rows and columns that belong
to value heads change their order. `ssm_a` holds -exp(A_log).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from .convert_rope import positive
from .errors import FileFormatError, UnsupportedError

# Factors of Falcon-H1, each 1 where the config has none.
FALCON_SCALES = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"),
    *("ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
)
ATTENTION = ("full_attention", "attention")


class CountedKeys(Protocol):
    values: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int: ...

    def number(self, key: str) -> float: ...


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to a tensor on its way into the file. Orders tell where each row or column of
    the new one comes from."""

    rows: np.ndarray | None = None
    cols: np.ndarray | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    scale: float | np.ndarray = 1.0  # of all rows, or of each
    shape: tuple[int, ...] = ()  # in the file, where it is another one


NO_CHANGE = Change()


class LayerParts(NamedTuple):
    is_recurrent: bool = False
    has_attention: bool = True
    has_mlp: bool = True


PLAIN = LayerParts()


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Of a checked config."""

    layers: tuple[LayerParts, ...]
    parts: Mapping[str, tuple[int, ...]]  # shapes by name under model.layers.N
    metadata: Mapping[str, Any]  # without `ARCH.`
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By name within a layer, or of what is not in a layer by its whole name."""
    q_rows: int = 1  # rows of a query head, in heads: 2 where a gate stands behind each
    mixed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors whose rows are those of several parts in turn; which, the changes of these tell."""


def _instead(keys: CountedKeys, *names: str) -> tuple[LayerParts, ...]:
    """Layers of these kinds are recurrent, the others have attention."""
    n_layers, kinds = keys.count("num_hidden_layers"), keys.values.get("layer_types")
    if kinds is None and "full_attention_interval" in keys.values:
        every = keys.count("full_attention_interval")
        attends = [(n + 1) % every == 0 for n in range(n_layers)]
        return tuple(LayerParts(not attention, attention) for attention in attends)
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise FileFormatError(f"config.json: layer_types does not name {n_layers} layers")
    for kind in kinds:
        if kind not in (*names, *ATTENTION):
            raise UnsupportedError(f"config.json: layer type {kind!r} is not supported")
    return tuple(LayerParts(kind in names, kind not in names) for kind in kinds)


def _kv_heads(keys: CountedKeys, layers: tuple[LayerParts, ...]) -> list[int]:
    """Of each layer; none of those without attention."""
    kv_heads = keys.count("num_key_value_heads")
    return [kv_heads if layer.has_attention else 0 for layer in layers]


def short_convolution(keys: CountedKeys) -> Recurrence:
    dim, taps = keys.count("hidden_size"), keys.count("conv_L_cache")
    if keys.values.get("conv_bias"):
        raise UnsupportedError("config.json: conv_bias is true, which is not supported")
    layers = _instead(keys, "conv")
    return Recurrence(
        layers,
        {
            "conv.in_proj.weight": (3 * dim, dim),
            "conv.conv.weight": (dim, taps),
            "conv.out_proj.weight": (dim, dim),
        },
        {
            "shortconv.l_cache": taps,
            "attention.head_count_kv": _kv_heads(keys, layers),
        },
    )


def adjusted_ffn_dim(keys: CountedKeys) -> int:
    """As LFM2 derives it: two thirds, times a factor, up to a multiple."""
    ffn_dim = keys.count("intermediate_size")
    if not keys.values.get("block_auto_adjust_ff_dim", True):
        return ffn_dim
    multiple, factor = keys.count("block_multiple_of"), keys.values["block_ffn_dim_multiplier"]
    return multiple * -(-int(factor * int(2 * ffn_dim / 3)) // multiple)


def delta_net(keys: CountedKeys) -> Recurrence:
    sizes = _DeltaSizes.of(keys)
    k_heads, v_heads, d = sizes.k_heads, sizes.v_heads, sizes.head_dim
    heads = np.arange(v_heads).reshape(k_heads, -1).T.reshape(-1)  # tiled from grouped
    values = (heads[:, None] * d + np.arange(d)).reshape(-1)
    n_before = 2 * k_heads * d
    order = np.concatenate((np.arange(n_before), n_before + values))
    by_head = Change(heads)
    return _delta_net(
        keys,
        sizes,
        {
            "in_proj_qkv.weight": ((sizes.channels, sizes.dim), Change(order)),
            "in_proj_z.weight": ((len(values), sizes.dim), Change(values)),
            "in_proj_b.weight": ((v_heads, sizes.dim), by_head),
            "in_proj_a.weight": ((v_heads, sizes.dim), by_head),
            "conv1d.weight": ((sizes.channels, sizes.taps), Change(order)),
            "A_log": ((v_heads,), Change(heads, values=_minus_exp)),
            "dt_proj.bias": ((v_heads,), by_head),
            "out_proj.weight": ((sizes.dim, len(values)), Change(cols=values)),
        },
    )


def grouped_delta_net(keys: CountedKeys) -> Recurrence:
    """As Qwen3-Next has it, in the checkpoint as in the file; q, k, v and z of each key head stand
    in turn in one tensor of the checkpoint, and so do beta and alpha, in the file as well."""
    sizes = _DeltaSizes.of(keys)
    d, dim, v_heads, of_values = sizes.head_dim, sizes.dim, sizes.v_heads, sizes.values
    rows = np.arange(2 * sizes.k_heads * d + 2 * of_values).reshape(sizes.k_heads, -1)
    each = of_values // sizes.k_heads
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, (d, 2 * d, 2 * d + each), axis=1))
    found = _delta_net(
        keys,
        sizes,
        {
            "in_proj_qkv.weight": ((sizes.channels, dim), Change(np.concatenate((q, k, v)))),
            "in_proj_z.weight": ((of_values, dim), Change(z)),
            "in_proj_ba.weight": ((2 * v_heads, dim), NO_CHANGE),
            "conv1d.weight": ((sizes.channels, sizes.taps), NO_CHANGE),
            "A_log": ((v_heads,), Change(values=_minus_exp)),
            "dt_proj.bias": ((v_heads,), NO_CHANGE),
            "out_proj.weight": ((dim, of_values), NO_CHANGE),
        },
    )
    parts = tuple(f"{_DELTA}in_proj_{part}.weight" for part in ("qkv", "z"))
    return replace(found, mixed={f"{_DELTA}in_proj_qkvz.weight": parts})


@dataclass(frozen=True)
class _DeltaSizes:
    dim: int
    taps: int
    k_heads: int
    v_heads: int
    head_dim: int

    @classmethod
    def of(cls, keys: CountedKeys) -> _DeltaSizes:
        k_heads, v_heads = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
        head_dim, value_dim = (keys.count(f"linear_{of}_head_dim") for of in ("key", "value"))
        if value_dim != head_dim or v_heads % k_heads:
            raise UnsupportedError(
                f"config.json: {v_heads} value heads of {value_dim} beside {k_heads} key heads of "
                f"{head_dim} are not supported"
            )
        taps = keys.count("linear_conv_kernel_dim")
        return cls(keys.count("hidden_size"), taps, k_heads, v_heads, head_dim)

    @property
    def values(self) -> int:
        return self.v_heads * self.head_dim

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.head_dim + self.values


_DELTA = "linear_attn."


def _minus_exp(a: np.ndarray) -> np.ndarray:
    return -np.exp(a)


def _delta_net(
    keys: CountedKeys, sizes: _DeltaSizes, table: Mapping[str, tuple[tuple[int, ...], Change]]
) -> Recurrence:
    table = {**table, "norm.weight": ((sizes.head_dim,), NO_CHANGE)}
    layers = _instead(keys, "linear_attention")
    return Recurrence(
        layers,
        {f"{_DELTA}{part}": shape for part, (shape, _) in table.items()},
        {
            "attention.recurrent_layers": [layer.is_recurrent for layer in layers],
            "ssm.conv_kernel": sizes.taps,
            "ssm.group_count": sizes.k_heads,
            "ssm.time_step_rank": sizes.v_heads,
            "ssm.state_size": sizes.head_dim,
            "ssm.inner_size": sizes.values,
        },
        {f"{_DELTA}{part}": change for part, (_, change) in table.items()},
        q_rows=2,
    )


def mamba2(keys: CountedKeys) -> Recurrence:
    """In the place of attention."""
    return _mamba2(keys, _instead(keys, *_MAMBA))


def _mamba2(keys: CountedKeys, layers: tuple[LayerParts, ...]) -> Recurrence:
    dim, taps = keys.count("hidden_size"), keys.count("mamba_d_conv")
    heads, groups = keys.count("mamba_n_heads"), keys.count("mamba_n_groups")
    state_dim, head_dim = keys.count("mamba_d_state"), _mamba2_head_dim(keys, dim, heads)
    if heads % groups:
        raise FileFormatError(f"config.json: {heads} heads of Mamba-2 in {groups} groups")
    _refuse(keys, "mamba_proj_bias", (False,))
    _refuse(keys, "time_step_limit", _NO_LIMITS)
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    table: dict[str, tuple[tuple[int, ...], Change]] = {
        "in_proj.weight": ((inner + channels + heads, dim), NO_CHANGE),
        "conv1d.weight": ((channels, taps), NO_CHANGE),
        "A_log": ((heads,), Change(values=lambda a: -np.exp(a), shape=(heads, 1))),
        "D": ((heads,), Change(shape=(heads, 1))),
        "dt_proj.bias": ((heads,), NO_CHANGE),
        "norm.weight": ((inner,), Change(shape=(groups, inner // groups))),
        "out_proj.weight": ((dim, inner), NO_CHANGE),
    }
    if keys.values.get("mamba_conv_bias"):
        table["conv1d.bias"] = ((channels,), NO_CHANGE)
    return Recurrence(
        layers,
        {f"mamba.{part}": shape for part, (shape, _) in table.items()},
        {
            "attention.head_count_kv": _kv_heads(keys, layers),
            "ssm.conv_kernel": taps,
            "ssm.group_count": groups,
            "ssm.time_step_rank": heads,
            "ssm.state_size": state_dim,
            "ssm.inner_size": inner,
        },
        {f"mamba.{part}": change for part, (_, change) in table.items()},
    )


def _mamba2_head_dim(keys: CountedKeys, dim: int, heads: int) -> int:
    if keys.values.get("mamba_d_head", "auto") != "auto":
        return keys.count("mamba_d_head")
    inner = keys.count("mamba_d_ssm", keys.count("mamba_expand", 2) * dim)
    if inner % heads:
        raise FileFormatError(f"config.json: {inner} values in {heads} heads of Mamba-2")
    return inner // heads


# As transformers writes infinity, as Python's json does, and none at all.
_NO_LIMITS = (None, [0, {"__float__": "Infinity"}], [0, float("inf")])


def _refuse(keys: CountedKeys, key: str, supported: tuple[Any, ...]) -> None:
    if (value := keys.values.get(key, supported[0])) not in supported:
        raise UnsupportedError(f"config.json: {key} is {value!r:.80}, which is not supported")


def falcon_h1(keys: CountedKeys) -> Recurrence:
    """Beside attention in every layer. What activations are multiplied by goes into the weights:
    readers of the file know no such factors."""
    found = _mamba2(keys, (LayerParts(is_recurrent=True),) * keys.count("num_hidden_layers"))
    parts, inner = dict(found.parts), found.metadata["ssm.inner_size"]
    if not keys.values["mamba_rms_norm"]:
        del parts["mamba.norm.weight"]
    else:
        _refuse(keys, "mamba_norm_before_gate", (False,))
    scales = {key: keys.number(key) for key in FALCON_SCALES}
    if keys.values.get("tie_word_embeddings") and (
        scales["embedding_multiplier"] != scales["lm_head_multiplier"]
    ):
        raise UnsupportedError(
            "config.json: tie_word_embeddings with an embedding_multiplier that is not the "
            "lm_head_multiplier is not supported"
        )
    gate, down = _numbers(keys, "mlp_multipliers", 2)
    bc = found.metadata["ssm.group_count"] * found.metadata["ssm.state_size"]
    heads = found.metadata["ssm.time_step_rank"]
    columns = np.repeat(_numbers(keys, "ssm_multipliers", 5), (inner, inner, bc, bc, heads))
    attention_in = scales["attention_in_multiplier"]
    changes: dict[str, float | np.ndarray] = {
        "model.embed_tokens.weight": scales["embedding_multiplier"],
        "lm_head.weight": scales["lm_head_multiplier"],
        "self_attn.q_proj.weight": attention_in,
        "self_attn.k_proj.weight": attention_in * scales["key_multiplier"],
        "self_attn.v_proj.weight": attention_in,
        "self_attn.o_proj.weight": scales["attention_out_multiplier"],
        "mlp.gate_proj.weight": gate,
        "mlp.down_proj.weight": down,
        "mamba.in_proj.weight": scales["ssm_in_multiplier"] * columns[:, None],
        "mamba.out_proj.weight": scales["ssm_out_multiplier"],
    }
    scaled = {name: Change(scale=scale) for name, scale in changes.items()}
    return replace(found, parts=parts, changes={**found.changes, **scaled})


def nemotron_h(keys: CountedKeys) -> Recurrence:
    """Each layer is of Mamba-2, of attention or an MLP, and nothing else."""
    kinds, mlp = layer_kinds(keys.values), "moe" if has_experts(keys.values) else "mlp"
    for kind in kinds:
        if kind not in (*_MAMBA, *ATTENTION, mlp):
            raise UnsupportedError(
                f"config.json: layer type {kind!r} is not supported beside {mlp}"
            )
    for key, supported in _NEMOTRON_NEUTRAL.items():
        _refuse(keys, key, supported)
    layers = tuple(LayerParts(kind in _MAMBA, kind in ATTENTION, kind == mlp) for kind in kinds)
    width = keys.count("moe_intermediate_size" if mlp == "moe" else "intermediate_size")
    found = _mamba2(keys, layers)
    widths = [width if layer.has_mlp else 0 for layer in layers]
    # Other readers take the epsilon of RMS norms from the key of the other kind, too.
    others = {
        "feed_forward_length": widths,
        "attention.layer_norm_epsilon": keys.number("rms_norm_eps"),
    }
    return replace(found, metadata={**found.metadata, **others})


def layer_kinds(config: Mapping[str, Any]) -> list[Any]:
    """What Nemotron-H's layers are; older configs have a letter for each."""
    kinds = config.get("layer_types")
    if isinstance(kinds, str):
        return [_LETTERS.get(letter, letter) for letter in kinds]
    return kinds if isinstance(kinds, list) else []


def has_experts(config: Mapping[str, Any]) -> bool:
    return "moe" in layer_kinds(config)


_MAMBA = ("mamba", "linear_attention")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": ("relu2",),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "moe_latent_size": (None,),
}


def _numbers(keys: CountedKeys, key: str, n: int) -> list[float]:
    values = keys.values.get(key, [1.0] * n)
    if not isinstance(values, list) or len(values) != n:
        raise FileFormatError(f"config.json: {key} is {values!r:.80}, expected {n} numbers")
    return [positive(key, value) for value in values]


READERS: dict[str, Callable[[CountedKeys], Recurrence]] = {
    "short convolution": short_convolution,
    "delta net": delta_net,
    "grouped delta net": grouped_delta_net,
    "Mamba-2": mamba2,
    "Mamba-2 beside attention": falcon_h1,
    "Mamba-2 in layers of one part": nemotron_h,
}
