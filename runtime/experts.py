"""What a model file says about its experts: which layers have them, and how rows choose.

Owns: the metadata keys of experts and the defaults of architectures for them. Must not know: ops'
records, plans or tensors. Key names and defaults are those of the `gguf` package and of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import FileFormatError, UnsupportedError
from .metadata_keys import Keys
from .ops import Gating

_GATINGS = {1: Gating.SOFTMAX, 2: Gating.SIGMOID, 3: Gating.CHOSEN}  # as files number them


@dataclass(frozen=True)
class ExpertDefaults:
    """Of an architecture whose files may have experts."""

    gating: Gating = Gating.SOFTMAX
    renormalize: bool = False
    sigmoid_vocab: int = 0  # files with so many tokens leave it unsaid that gating is by sigmoid


@dataclass(frozen=True)
class Experts:
    """Of one layer. Every row passes through the shared expert, if there is one."""

    count: int
    used: int
    dim: int  # values between gate and down
    shared_dim: int  # the same of the shared expert, or of several side by side; 0: there is none
    gating: Gating
    renormalize: bool
    scale: float
    groups: int
    groups_used: int


def read_experts(keys: Keys, defaults: ExpertDefaults, ffn_dims: list[int]) -> list[Experts | None]:
    """For each layer its experts, or None where it is dense."""
    n_layers = len(ffn_dims)
    count = keys.count("expert_count", 0)
    if count == 0:
        return [None] * n_layers
    first = keys.count("leading_dense_block_count", 0)
    every = keys.count("interleave_moe_layer_step", 1) or 1
    second_of = keys.count("moe_every_n_layers", 0)  # of so many layers the second alone has them
    # Where files do not say how wide experts are, they are as wide as a dense layer would be.
    dims = keys.per_layer("expert_feed_forward_length", n_layers, ffn_dims, least=0)
    has = [n >= first and (n + 1) % every == 0 for n in range(n_layers)]
    if second_of:
        has = [n % second_of == 1 for n in range(n_layers)]
    return [
        _layer(keys, defaults, count, dim) if has_experts else None
        for dim, has_experts in zip(dims, has, strict=True)
    ]


def _layer(keys: Keys, defaults: ExpertDefaults, count: int, dim: int) -> Experts:
    if dim < 1:
        raise FileFormatError(
            f"{keys.arch}.expert_feed_forward_length is {dim}, expected 1 or more"
        )
    used, groups = keys.count("expert_used_count"), keys.count("expert_group_count", 1) or 1
    groups_used = keys.count("expert_group_used_count", groups) or groups
    if count % groups or groups_used > groups or used > count // groups * groups_used:
        raise FileFormatError(
            f"{keys.arch}: {used} of {count} experts are to be used, of {groups_used} of {groups} "
            "groups, which cannot be"
        )
    return Experts(
        count=count,
        used=used,
        dim=dim,
        shared_dim=_shared_dim(keys, dim),
        gating=_gating(keys, defaults),
        renormalize=keys.flag("expert_weights_norm", defaults.renormalize),
        scale=keys.number("expert_weights_scale", 1.0) or 1.0,
        groups=groups,
        groups_used=groups_used,
    )


def _shared_dim(keys: Keys, dim: int) -> int:
    """Of all shared experts, which lie side by side as one; by default as wide as the others."""
    n_shared = keys.count("expert_shared_count", 0)
    return keys.count("expert_shared_feed_forward_length", 0) or n_shared * dim


def _gating(keys: Keys, defaults: ExpertDefaults) -> Gating:
    default = defaults.gating
    if defaults.sigmoid_vocab and keys.count("vocab_size", 0) == defaults.sigmoid_vocab:
        default = Gating.SIGMOID
    code = keys.count("expert_gating_func", 0)
    if code and code not in _GATINGS:
        raise UnsupportedError(f"{keys.arch}.expert_gating_func is {code}, which is not supported")
    return _GATINGS.get(code, default)
