"""What a model file says about latent attention: the sizes of heads before keys are compressed.

Owns: its metadata keys, and the refusal of files from before they existed. Must not know: ops,
plans, the bytes of weights. Keys are those of the `gguf` package. In a layer's own sizes head_dim
is a compressed key, [values | what turns], and value_dim its values; there is one for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import FileFormatError, UnsupportedError
from .metadata_keys import Keys
from .rope import yarn_query_scale


@dataclass(frozen=True)
class Latent:
    """Of one layer's heads."""

    q_rank: int  # values that rows are compressed to before queries are made of them; 0: none
    query_dim: int  # of a head: what meets the compressed values, then what turns
    value_dim: int  # of a head, after expansion

    def scale(self, keys: Keys) -> float:
        """Scores are multiplied by it."""
        return float(yarn_query_scale(keys) ** 2 * self.query_dim**-0.5)


def read_latent(keys: Keys, kv_heads: int, head_dim: int, value_dim: int, n_rot: int) -> Latent:
    """Checks that a layer's sizes fit each other."""
    if not keys.count("attention.key_length_mla", 0):
        raise UnsupportedError(
            f"{keys.arch}.attention.key_length_mla is missing: this file is from before attn_kv_b "
            "was split into attn_k_b and attn_v_b; convert the model anew, or fetch a newer file"
        )
    query_dim = keys.count("attention.key_length_mla")
    rank = keys.count("attention.kv_lora_rank")
    if kv_heads != 1 or value_dim != rank or head_dim != rank + n_rot or query_dim <= n_rot:
        raise FileFormatError(
            f"{keys.arch}: {kv_heads} compressed keys of {head_dim}, of which {value_dim} are "
            f"values and {n_rot} turn, do not fit kv_lora_rank {rank} and heads of {query_dim}"
        )
    return Latent(
        keys.count("attention.q_lora_rank", 0),
        query_dim,
        keys.count("attention.value_length_mla"),
    )
