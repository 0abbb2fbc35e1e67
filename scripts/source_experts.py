"""What layers with experts compute, from the checkpoint's own weights, in plain NumPy.

Owns: the choice of experts and their weighted sum, as `transformers` 5.24 defines them for the
convertible classes. Must not know: GGUF, attention, files. Called by source_forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from martlet.quant.convert_experts import SourceExperts

Linear = Callable[[np.ndarray, str], np.ndarray]
Vector = Callable[[str], np.ndarray]


def experts_forward(
    x: np.ndarray,
    at: str,
    experts: SourceExperts,
    config: Mapping[str, Any],
    linear: Linear,
    vector: Vector,
    activate: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """x (n, dim); `linear` multiplies by a tensor, `at` is the layer's prefix."""
    keys = experts.keys
    module = f"{at}{keys.module}."

    def mlp(rows: np.ndarray, name: str) -> np.ndarray:
        gate, up, down = (f"{module}{name}.{part}" for part in keys.parts)
        if not keys.parts[0]:
            return linear(activate(linear(rows, up)).astype(np.float32), down)
        gated = activate(linear(rows, gate)) * linear(rows, up)
        return linear(gated.astype(np.float32), down)

    logits = linear(x, f"{module}gate")
    bias = vector(f"{module}{keys.choice_bias}") if keys.choice_bias else np.float32(0)
    ids, weights = _chosen(logits, bias, experts, config)
    out = np.zeros_like(x)
    for e in range(experts.count):
        rows, places = np.nonzero(ids == e)
        if rows.size:
            out[rows] += weights[rows, places, None] * mlp(x[rows], f"experts.{e}")
    if experts.shared_dim:
        shared = mlp(x, keys.shared)
        if keys.has_shared_gate:
            shared = shared / (1 + np.exp(-linear(x, f"{module}shared_expert_gate")))
        out += shared
    return out


def _chosen(
    logits: np.ndarray, bias: np.ndarray, experts: SourceExperts, config: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Experts of every row and what they count, each (n, used)."""
    said = experts.metadata
    if said.get("expert_gating_func") == 2:
        p = 1 / (1 + np.exp(-logits))
    else:
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
    scores = p + bias
    groups = said.get("expert_group_count", 1)
    by_group = scores.reshape(len(p), groups, -1)
    worth = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
    least = np.sort(worth, axis=1)[:, -said.get("expert_group_used_count", groups), None]
    scores = np.where((worth >= least)[:, :, None], by_group, -np.inf).reshape(p.shape)
    ids = np.argsort(-scores, axis=1)[:, : said["expert_used_count"]]
    weights = np.take_along_axis(p, ids, axis=1)
    if config.get("norm_topk_prob", experts.keys.normalizes is not False):
        weights = weights / weights.sum(axis=1, keepdims=True)
    return ids, weights * np.float32(said.get("expert_weights_scale", 1.0))
