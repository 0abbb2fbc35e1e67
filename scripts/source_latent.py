"""What latent attention of a checkpoint computes, expanded for every head, in plain NumPy: part of
source_forward.py.

Owns: DeepSeek's attention as `transformers` 5.24 defines it. Must not know: GGUF, nor that keys
need not be expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from martlet.scripts.source_recurrent import Source

Rotate = Callable[[np.ndarray], np.ndarray]
_INNER_EPS = 1e-6  # whatever rms_norm_eps is


def latent_attention(
    source: Source, at: str, x: np.ndarray, rope: Mapping[str, Any], rotated: Rotate
) -> np.ndarray:
    """x (n, dim); rope: the settings of a config; rotated turns (n, heads, n_rot)."""
    s, of = source.settings, f"{at}self_attn."
    latent, n = s.latent, len(x)
    assert latent is not None

    def normed(rows: np.ndarray, name: str) -> np.ndarray:
        square = np.mean(rows.astype(np.float64) ** 2, axis=1, keepdims=True)
        weight = source.rows(f"{of}{name}.weight", slice(None))[:, 0]
        return (rows / np.sqrt(square + _INNER_EPS)).astype(np.float32) * weight

    if latent.q_rank:
        a = normed(source.linear(x, f"{of}q_a_proj"), "q_a_layernorm")
        q = source.linear(a, f"{of}q_b_proj")
    else:
        q = source.linear(x, f"{of}q_proj")
    q = q.reshape(n, s.heads, -1)
    compressed = source.linear(x, f"{of}kv_a_proj_with_mqa")
    c, turned = np.split(compressed, [latent.rank], axis=1)
    expanded = source.linear(normed(c, "kv_a_layernorm"), f"{of}kv_b_proj")
    k, v = np.split(expanded.reshape(n, s.heads, -1), [latent.key_dim], axis=2)
    turned = np.repeat(rotated(turned[:, None, :]), s.heads, axis=1)
    k = np.concatenate((k, turned), axis=2)
    q = np.concatenate((q[:, :, : latent.key_dim], rotated(q[:, :, latent.key_dim :])), axis=2)
    scores = np.einsum("qhd,khd->hqk", q, k) * _scale(q.shape[2], rope)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights.astype(np.float32), v)
    return source.linear(mixed.reshape(n, -1), f"{of}o_proj")


def _scale(query_dim: int, rope: Mapping[str, Any]) -> float:
    """Scores of stretched contexts grow with the logarithm of the factor."""
    grown, share, factor = 1.0, rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    if rope.get("rope_type", rope.get("type", "default")) != "default" and share and factor > 1:
        grown = 0.1 * share * math.log(factor) + 1
    return float(grown**2 / math.sqrt(query_dim))
