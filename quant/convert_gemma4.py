"""Gemma 4's checkpoints: layers of two sizes, of which the last may have no keys of their own.

Owns: the shapes of a layer's tensors, and the keys of config.json and of the GGUF that say them.
Must not know: files, how tensors are written. Key names are those of `transformers` 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .convert_rope import RopeKeys, positive
from .errors import FileFormatError, UnsupportedError

_FIXED = 1e30  # divides the frequencies of pairs that do not turn
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")

Shapes = dict[str, tuple[int, ...]]


class Counts(Protocol):
    """What a checked config gives."""

    values: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int: ...


@dataclass(frozen=True)
class Layered:
    """Sizes of layers that differ, and what else this family has."""

    dim: int
    ffn_dim: int
    heads: int
    head_dims: tuple[int, ...]
    kv_heads: tuple[int, ...]
    is_local: tuple[bool, ...]
    n_readers: int  # the last layers read the keys of others
    is_wide: bool  # and have MLPs of twice the width
    keys_are_values: bool  # in global layers
    own_dim: int  # values that each layer gets of a token's own; 0: none
    own_tokens: int
    experts: tuple[int, int, int] | None  # how many, of which so many are used, of this width

    @classmethod
    def of(cls, keys: Counts, is_local: tuple[bool, ...]) -> Layered:
        n, given = len(is_local), keys.values
        local = keys.count("head_dim", 256), keys.count("num_key_value_heads", 4)
        wide = keys.count("global_head_dim", 512), local[1]
        if given.get("attention_k_eq_v") and "num_global_key_value_heads" in given:
            wide = wide[0], keys.count("num_global_key_value_heads")
        sizes = [local if is_near else wide for is_near in is_local]
        overrides = given.get("per_layer_config", {})
        if not isinstance(overrides, dict):
            raise FileFormatError("config.json: per_layer_config is not a JSON object")
        for at, values in overrides.items():
            if not (at.isdecimal() and int(at) < n and isinstance(values, dict)):
                raise FileFormatError(f"config.json: per_layer_config names {at!r:.40}, no layer")
            if not values.keys() <= {"head_dim", "num_key_value_heads"}:
                raise UnsupportedError(f"config.json: per_layer_config of layer {at}: {values}")
            head_dim = values.get("head_dim", local[0])
            sizes[int(at)] = head_dim, values.get("num_key_value_heads", local[1])
        experts = None
        if given.get("enable_moe_block"):
            names = ("num_experts", "top_k_experts", "moe_intermediate_size")
            count, used, width = (keys.count(name) for name in names)
            experts = count, used, width
        own_dim = given.get("hidden_size_per_layer_input", 256)
        return cls(
            dim=keys.count("hidden_size"),
            ffn_dim=keys.count("intermediate_size"),
            heads=keys.count("num_attention_heads"),
            head_dims=tuple(head_dim for head_dim, _ in sizes),
            kv_heads=tuple(kv_heads for _, kv_heads in sizes),
            is_local=is_local,
            n_readers=int(given.get("num_kv_shared_layers", 0)),
            is_wide=bool(given.get("use_double_wide_mlp")),
            keys_are_values=bool(given.get("attention_k_eq_v")),
            own_dim=own_dim,
            own_tokens=keys.count("vocab_size_per_layer_input", 262144) if own_dim else 0,
            experts=experts,
        )

    def rope(self, config: Mapping[str, Any]) -> RopeKeys:
        """Of a global layer's pairs the first quarter turns, as fast as if all did."""
        ropes = config.get("rope_parameters") or {}
        full = ropes.get("full_attention", {}) if isinstance(ropes, dict) else {}
        kind = full.get("rope_type", "proportional")
        if kind != "proportional" or set(full) - {
            *("rope_type", "rope_theta", "partial_rotary_factor"),
        }:
            raise UnsupportedError(f"config.json: rope of global layers is {full}: not supported")
        n_pairs = self._head_dim(is_local=False) // 2
        share = positive("partial_rotary_factor", full.get("partial_rotary_factor", 0.25))
        divisors = np.full(n_pairs, _FIXED, np.float32)
        divisors[: int(share * n_pairs)] = 1
        metadata = {"rope.freq_base": positive("rope_theta", full.get("rope_theta", 1e6))}
        return RopeKeys(metadata, {"rope_freqs.weight": divisors}, 2 * n_pairs)

    @property
    def metadata(self) -> dict[str, Any]:
        local, full = self._head_dim(is_local=True), self._head_dim(is_local=False)
        n = len(self.is_local)
        keys: dict[str, Any] = {
            "attention.key_length": full,
            "attention.value_length": full,
            "attention.key_length_swa": local,
            "attention.value_length_swa": local,
            "rope.dimension_count": full,
            "rope.dimension_count_swa": local,
            "attention.head_count_kv": list(self.kv_heads),
            "attention.shared_kv_layers": self.n_readers,
            "embedding_length_per_layer_input": self.own_dim,
            "attention.sliding_window_pattern": list(self.is_local),
            "feed_forward_length": [self._ffn(at) for at in range(n)],
        }
        if self.experts:
            names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
            keys |= dict(zip(names, self.experts, strict=True))
        return keys

    def _head_dim(self, *, is_local: bool) -> int:
        kinds = zip(self.head_dims, self.is_local, strict=True)
        found = {head_dim for head_dim, is_near in kinds if is_near is is_local}
        if len(found) != 1:
            kind = "local" if is_local else "global"
            raise UnsupportedError(f"config.json: {kind} layers have heads of {sorted(found)}")
        return found.pop()

    def _reads(self, n: int) -> bool:
        return n >= len(self.is_local) - self.n_readers

    def _ffn(self, n: int) -> int:
        return self.ffn_dim * (2 if self.is_wide and self._reads(n) else 1)

    def tables(self) -> Shapes:
        """Of the model, besides its embedding."""
        if not self.own_dim:
            return {}
        width = len(self.is_local) * self.own_dim
        return {
            "model.embed_tokens_per_layer.weight": (self.own_tokens, width),
            "model.per_layer_model_projection.weight": (width, self.dim),
            "model.per_layer_projection_norm.weight": (self.own_dim,),
        }

    def layer(self, n: int) -> Shapes:
        """By name within layer n."""
        d, dim, ffn = self.head_dims[n], self.dim, self._ffn(n)
        shapes: Shapes = {f"{name}.weight": (dim,) for name in _NORMS}
        shapes["post_feedforward_layernorm.weight"] = (dim,)
        shapes |= {
            "self_attn.q_proj.weight": (self.heads * d, dim),
            "self_attn.o_proj.weight": (dim, self.heads * d),
            "self_attn.q_norm.weight": (d,),
            "mlp.gate_proj.weight": (ffn, dim),
            "mlp.up_proj.weight": (ffn, dim),
            "mlp.down_proj.weight": (dim, ffn),
            "layer_scalar": (1,),
        }
        if not self._reads(n):
            shapes["self_attn.k_proj.weight"] = (self.kv_heads[n] * d, dim)
            shapes["self_attn.k_norm.weight"] = (d,)
            if self.is_local[n] or not self.keys_are_values:
                shapes["self_attn.v_proj.weight"] = (self.kv_heads[n] * d, dim)
        if self.own_dim:
            shapes |= {
                "per_layer_input_gate.weight": (self.own_dim, dim),
                "per_layer_projection.weight": (dim, self.own_dim),
                "post_per_layer_input_norm.weight": (dim,),
            }
        if self.experts:
            count, _, width = self.experts
            shapes |= {
                "post_feedforward_layernorm_1.weight": (dim,),
                "post_feedforward_layernorm_2.weight": (dim,),
                "pre_feedforward_layernorm_2.weight": (dim,),
                "router.scale": (dim,),
                "router.per_expert_scale": (count,),
                "router.proj.weight": (count, dim),
                "experts.gate_proj.weight": (count, width, dim),
                "experts.up_proj.weight": (count, width, dim),
                "experts.down_proj.weight": (count, dim, width),
            }
        return shapes


# By the name in the checkpoint; of a layer's, without its number.
GGUF_NAMES = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
    "experts.gate_proj.weight": "ffn_gate_exps.weight",
    "experts.up_proj.weight": "ffn_up_exps.weight",
    "experts.down_proj.weight": "ffn_down_exps.weight",
}
