"""Latent attention in a checkpoint: its sizes, parts and metadata, and the tensors cut by heads.

Owns: the names of `transformers` 5.24 for what a GGUF file calls deepseek2, and the two halves of
kv_b_proj. Must not know: other parts of a layer, files.

kv_b_proj expands a compressed row to a key and a value of every head. In a file its rows for keys
stand transposed, head by head, to be multiplied with queries: q . (K c) = (q K) . c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .convert_experts import Source
from .convert_recurrent import CountedKeys
from .errors import UnsupportedError

_JOINT = ".self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class SourceLatent:
    """Of a checked config."""

    rank: int  # values that keys and values of all heads are compressed to
    q_rank: int  # the same of queries; 0: they are not
    heads: int
    key_dim: int  # of a head: of keys that meet queries unturned
    n_rot: int  # dims that turn, one key's for all heads
    value_dim: int  # of a head

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.n_rot

    @property
    def metadata(self) -> dict[str, Any]:
        """Without the architecture's prefix. Some readers want a q_lora_rank, if it is 0."""
        return {
            "attention.head_count_kv": 1,
            "attention.key_length": self.rank + self.n_rot,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.query_dim,
            "attention.value_length_mla": self.value_dim,
            "attention.kv_lora_rank": self.rank,
            "attention.q_lora_rank": self.q_rank,
        }

    def parts(self) -> dict[str, tuple[str, ...]]:
        """Names within a layer, and their dims, of `sizes` and of the model."""
        queries: dict[str, tuple[str, ...]] = {"self_attn.q_proj": ("queries", "dim")}
        if self.q_rank:
            queries = {
                "self_attn.q_a_proj": ("q_rank", "dim"),
                "self_attn.q_a_layernorm": ("q_rank",),
                "self_attn.q_b_proj": ("queries", "q_rank"),
            }
        return {
            **queries,
            "self_attn.kv_a_proj_with_mqa": ("latent_key", "dim"),
            "self_attn.kv_a_layernorm": ("rank",),
            "self_attn.k_b_proj": ("heads", "rank", "key_dim"),
            "self_attn.v_b_proj": ("heads", "value_dim", "rank"),
            "self_attn.o_proj": ("dim", "values"),
        }

    def sizes(self) -> dict[str, int]:
        return {
            "heads": self.heads,
            "queries": self.heads * self.query_dim,
            "q_rank": self.q_rank,
            "rank": self.rank,
            "latent_key": self.rank + self.n_rot,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "values": self.heads * self.value_dim,
        }


def read_latent(keys: CountedKeys) -> SourceLatent:
    if keys.values.get("rope_interleave", True) is not True:
        raise UnsupportedError("config.json: rope_interleave is false, which is not supported")
    return SourceLatent(
        rank=keys.count("kv_lora_rank"),
        q_rank=keys.count("q_lora_rank") if "q_lora_rank" in keys.values else 0,
        heads=keys.count("num_attention_heads"),
        key_dim=keys.count("qk_nope_head_dim"),
        n_rot=keys.count("qk_rope_head_dim"),
        value_dim=keys.count("v_head_dim"),
    )


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows first … first + n_of_head - 1 of every head of a tensor, as a stack of matrices."""

    name: str
    source: Source
    heads: int
    first: int
    n_of_head: int
    is_transposed: bool

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        sides = (self.n_of_head, self.source.shape[1])
        return (self.heads, *(sides[::-1] if self.is_transposed else sides))

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n_rows(self) -> int:
        return self.heads * self.shape[1]

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """Rows as a new float32 array (n, cols); the rows of a head follow those of the last."""
        assert isinstance(index, slice)
        height, every = self.shape[1], self.source.n_rows // self.heads
        found = []
        for h in range(index.start // height, -(-index.stop // height)):
            at = h * every + self.first
            matrix = self.source.rows(slice(at, at + self.n_of_head))
            matrix = matrix.T if self.is_transposed else matrix
            found.append(matrix[max(index.start - h * height, 0) : index.stop - h * height])
        return np.concatenate(found)


def split_heads(named: Mapping[str, Source], latent: SourceLatent) -> dict[str, Source | HeadRows]:
    """The tensors with kv_b_proj in its two halves; where its rows do not fit, as it is."""
    found: dict[str, Source | HeadRows] = {}
    for name, tensor in named.items():
        fits = tensor.n_rows == latent.heads * (latent.key_dim + latent.value_dim)
        if not name.endswith(_JOINT) or not fits:
            found[name] = tensor
            continue
        layer = name.removesuffix(_JOINT)
        for part, first, n, is_transposed in (
            ("k_b_proj", 0, latent.key_dim, True),
            ("v_b_proj", latent.key_dim, latent.value_dim, False),
        ):
            new = f"{layer}.self_attn.{part}.weight"
            found[new] = HeadRows(new, tensor, latent.heads, first, n, is_transposed)
    return found
