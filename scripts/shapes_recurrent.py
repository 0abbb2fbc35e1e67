"""Sizes of recurrent layers, the tensors these give, and their metadata.
Owns layers of gated delta nets and of Mamba-2; must not know other parts of a model.

Facts: the models' published configurations; names are those of the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecurrentShape:
    """Of the layers that have no attention. `attention` are those that do."""

    attention: tuple[int, ...]
    k_heads: int
    v_heads: int
    key_dim: int
    head_dim: int
    is_delta: bool  # a gated delta net, else Mamba-2
    taps: int = 4

    @property
    def values(self) -> int:
        return self.v_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.values + 2 * self.k_heads * self.key_dim

    def metadata(self, n_layers: int, kv_heads: int) -> dict[str, Any]:
        is_attention = [n in self.attention for n in range(n_layers)]
        return {
            "attention.head_count_kv": [kv_heads if has else 0 for has in is_attention],
            "attention.recurrent_layers": [not has for has in is_attention],
            "ssm.conv_kernel": self.taps,
            "ssm.group_count": self.k_heads,
            "ssm.time_step_rank": self.v_heads,
            "ssm.state_size": self.key_dim,
            "ssm.inner_size": self.values,
        }

    def tensors(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name within a layer."""
        heads = self.v_heads
        both: dict[str, tuple[int, ...]] = {
            "ssm_conv1d.weight": (self.channels, self.taps),
            "ssm_dt.bias": (heads,),
            "ssm_out.weight": (dim, self.values),
        }
        if self.is_delta:
            return both | {
                "attn_qkv.weight": (self.channels, dim),
                "attn_gate.weight": (self.values, dim),
                "ssm_beta.weight": (heads, dim),
                "ssm_alpha.weight": (heads, dim),
                "ssm_a": (heads,),
                "ssm_norm.weight": (self.head_dim,),
            }
        return both | {
            "ssm_in.weight": (self.values + self.channels + heads, dim),
            "ssm_conv1d.bias": (self.channels,),
            "ssm_a": (heads, 1),
            "ssm_d": (heads, 1),
            "ssm_norm.weight": (self.k_heads, self.values // self.k_heads),
        }
