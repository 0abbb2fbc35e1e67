"""What Gemma 4's layers of a checkpoint compute, in plain NumPy: part of source_forward.py.

Owns: those layers as `transformers` 5.24 defines them. Must not know: GGUF.
"""

from __future__ import annotations

import math

import numpy as np
from martlet.quant.convert_gemma4 import Layered
from martlet.scripts.source_recurrent import Source


def gemma4_layers(source: Source, layered: Layered, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """x (n, dim), the scaled embeddings of ids, behind the last layer."""
    n_layers = len(layered.is_local)
    own = _own(source, layered, x, ids) if layered.own_dim else None
    kept: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
    for n in range(n_layers):
        at = f"layers.{n}."
        mixed = _attention(source, layered, n, source.norm(x, at, "input_layernorm"), kept)
        x = x + source.norm(mixed, at, "post_attention_layernorm")
        fed = _mlp(source, f"{at}mlp.", source.norm(x, at, "pre_feedforward_layernorm"))
        if layered.experts:
            fed = source.norm(fed, at, "post_feedforward_layernorm_1")
            routed = _experts(source, layered, at, x)
            fed = fed + source.norm(routed, at, "post_feedforward_layernorm_2")
        x = x + source.norm(fed, at, "post_feedforward_layernorm")
        if own is not None:
            gate = _gelu(source.linear(x, f"{at}per_layer_input_gate")) * own[:, n]
            added = source.linear(gate, f"{at}per_layer_projection")
            x = x + source.norm(added, at, "post_per_layer_input_norm")
        x = x * source.rows(f"{at}layer_scalar", slice(None))[0, 0]
    return x


def _own(source: Source, layered: Layered, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(n, layers, own_dim) what each layer gets of a token and of its embedding."""
    shape = (len(x), len(layered.is_local), layered.own_dim)
    of_token = source.rows("embed_tokens_per_layer.weight", ids) * math.sqrt(layered.own_dim)
    projected = source.linear(x, "per_layer_model_projection") / math.sqrt(layered.dim)
    normed = source.norm(projected.reshape(shape), "", "per_layer_projection_norm")
    return ((normed + of_token.reshape(shape)) / math.sqrt(2)).astype(np.float32)


def _attention(
    source: Source,
    layered: Layered,
    n: int,
    x: np.ndarray,
    kept: dict[bool, tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """kept: the last keys and values of local and of global layers."""
    of, d, is_local = f"layers.{n}.self_attn.", layered.head_dims[n], layered.is_local[n]
    s, length = source.settings, len(x)

    def heads(name: str) -> np.ndarray:
        return source.linear(x, f"{of}{name}").reshape(length, -1, d)

    q = _turned(source.norm(heads("q_proj"), of, "q_norm"), layered, n, source)
    if n < len(layered.is_local) - layered.n_readers:
        k = heads("k_proj")
        v = heads("v_proj") if is_local or not layered.keys_are_values else k
        v = v / np.sqrt(np.mean(v**2, axis=2, keepdims=True) + s.norm_eps)
        kept[is_local] = _turned(source.norm(k, of, "k_norm"), layered, n, source), v
    k, v = (np.repeat(part, layered.heads // part.shape[1], axis=1) for part in kept[is_local])
    scores = np.einsum("qhd,khd->hqk", q, k)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (not is_local or distance < s.window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, v).astype(np.float32)
    return source.linear(mixed.reshape(length, -1), f"{of}o_proj")


def _turned(x: np.ndarray, layered: Layered, n: int, source: Source) -> np.ndarray:
    """Heads (n, heads, d) by their positions; of global layers the first pairs alone."""
    s, half = source.settings, x.shape[2] // 2
    base, divisors = s.local_rope_base, np.ones(half)
    if not layered.is_local[n]:
        base = s.rope.metadata["rope.freq_base"]
        divisors = s.rope.tensors["rope_freqs.weight"].astype(np.float64)
    assert base is not None
    frequencies = base ** (-np.arange(half) / half) / divisors
    angles = (np.arange(len(x))[:, None] * frequencies)[:, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[:, :, :half], x[:, :, half:]
    turned: np.ndarray = np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=2)
    return turned


def _mlp(source: Source, of: str, x: np.ndarray) -> np.ndarray:
    gated = _gelu(source.linear(x, f"{of}gate_proj")) * source.linear(x, f"{of}up_proj")
    return source.linear(gated, f"{of}down_proj")


def _experts(source: Source, layered: Layered, at: str, x: np.ndarray) -> np.ndarray:
    assert layered.experts is not None
    _, used, _ = layered.experts
    square = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
    scale = source.rows(f"{at}router.scale", slice(None))[:, 0] / math.sqrt(layered.dim)
    normed = (x / np.sqrt(square + source.settings.norm_eps)).astype(np.float32) * scale
    scores = source.linear(normed.astype(np.float32), f"{at}router.proj")
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    shares = source.rows(f"{at}router.per_expert_scale", slice(None))[:, 0]
    rows, out = source.norm(x, at, "pre_feedforward_layernorm_2"), np.zeros_like(x)
    for row in range(len(x)):
        chosen = np.argsort(-p[row])[:used]
        total = p[row, chosen].sum()
        for e in chosen:
            made = _mlp(source, f"{at}experts.{e}.", rows[row : row + 1])[0]
            out[row] += p[row, e] / total * shares[e] * made
    return out


def _gelu(x: np.ndarray) -> np.ndarray:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    gelu: np.ndarray = (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)
    return gelu
