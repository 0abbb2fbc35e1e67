"""The metadata keys of a dense decoder's sizes, as the `gguf` package names them.

Owns: key names without the architecture's prefix. Must not know: where sizes come from, rope's
scaling, tokenizers.
"""

from __future__ import annotations

from typing import Any


def dense_keys(
    *,
    n_layers: int,
    context: int,
    dim: int,
    ffn_dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm_eps: float,
    n_rot: int | None = None,
    is_centered: bool = False,
) -> dict[str, Any]:
    """Without `ARCH.` in front: int is uint32, float is float32. n_rot: dims of a head that turn,
    where not all do; is_centered: norms are LayerNorms; ffn_dim 0: no layer is dense."""
    return {
        "block_count": n_layers,
        "context_length": context,
        "embedding_length": dim,
        **({"feed_forward_length": ffn_dim} if ffn_dim else {}),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        f"attention.layer_norm_{'' if is_centered else 'rms_'}epsilon": norm_eps,
        "rope.dimension_count": head_dim if n_rot is None else n_rot,
    }
