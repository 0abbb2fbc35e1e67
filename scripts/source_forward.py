"""What a checkpoint computes: logits from its own weights, config and layout, in plain NumPy.

Owns: a forward pass in float32 of the convertible classes as `transformers` 5.24 defines them. Must
not know: GGUF, nor how tensors are converted; `convert --check` compares with it, so that an error
of the conversion cannot hide on both sides. Weights are read a slice at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert_config import Settings
from martlet.quant.convert_family import HeadNorm
from martlet.quant.convert_recurrent import PLAIN, LayerParts
from martlet.scripts.source_experts import experts_forward
from martlet.scripts.source_gemma4 import gemma4_layers
from martlet.scripts.source_latent import latent_attention
from martlet.scripts.source_recurrent import LAYERS as RECURRENT
from martlet.scripts.source_recurrent import falcon_scale, sigmoid
from martlet.scripts.source_turns import turned_experts

_SLICE_WEIGHTS = 1 << 24
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)")
_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def source_logits(
    checkpoint: Checkpoint, config: Mapping[str, Any], settings: Settings, ids: Sequence[int]
) -> np.ndarray:
    """float32 (len(ids), vocab_size) at every position of one sequence."""
    source, family = _Source(checkpoint, config, settings), settings.family
    norms, scales = family.norms, settings.scales
    x = source.rows("embed_tokens.weight", np.asarray(ids))
    x = x * np.float32(falcon_scale(source.scales, "embed_tokens"))
    if family.scales_embedding:
        x = x * np.float32(math.sqrt(settings.dim))
    x = x * np.float32(scales.get("embedding_scale", 1.0))
    residual_scale = np.float32(scales.get("residual_scale", 1.0))
    if settings.layered:
        x = gemma4_layers(source, settings.layered, x, np.asarray(ids))
    for n in range(0 if settings.layered else settings.n_layers):
        at = f"layers.{n}."
        layer = settings.recurrence.layers[n] if settings.recurrence else PLAIN
        normed = source.norm(x, at, norms.before_attention)
        if not layer.is_recurrent and not layer.has_attention:
            x = x + _fed(source, config, n, normed)
            continue
        mixed = source.norm(_mixed(source, config, n, layer, normed), at, norms.after_attention)
        x = x + mixed * residual_scale
        if family.is_parallel:
            x = x + _mlp(source, at, normed)
        elif layer.has_mlp:
            fed = _fed(source, config, n, source.norm(x, at, norms.before_mlp))
            x = x + source.norm(fed, at, norms.after_mlp) * residual_scale
        checkpoint.drop_pages()
    x = source.norm(x, "", family.final_norm.removeprefix("model."))
    logits = source.linear(x, "embed_tokens" if settings.is_tied else "lm_head", scaled="lm_head")
    logit_scale = scales.get("logit_scale", 1.0)
    logits = logits * np.float32(1 / logit_scale if family.divides_logits else logit_scale)
    return _capped(logits, settings.caps.get("final_logit_softcapping", 0.0))


def _capped(x: np.ndarray, cap: float) -> np.ndarray:
    return np.tanh(x / cap) * cap if cap else x


class _Source:
    """Tensors by the end of their name, which is the same in every class around the model."""

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], settings: Settings
    ) -> None:
        self.settings = settings
        self.scales = config if settings.family.arch == "falcon-h1" else {}
        self._tensors = {
            settings.family.renamed(name): tensor
            for name, tensor in checkpoint.tensors.items()
            if "vision" not in name and "visual" not in name
        }

    def find(self, ending: str) -> Any:
        found = [t for n, t in self._tensors.items() if n == ending or n.endswith(f".{ending}")]
        if ending == "norm.weight":  # that of the model, not of a layer
            found = [t for t in found if "layers." not in t.name]
        return found[0] if found else None

    def rows(self, ending: str, index: slice | np.ndarray) -> np.ndarray:
        rows: np.ndarray = self.find(ending).rows(index)
        return rows

    def norm(self, x: np.ndarray, at: str, name: str) -> np.ndarray:
        """x itself where the norm has no name."""
        if not name:
            return x
        weight = self.rows(f"{at}{name}.weight", slice(None))[:, 0]
        weight = weight + np.float32(self.settings.family.norm_offset)
        centred = x.astype(np.float64)
        if self.settings.family.is_centered:
            centred -= centred.mean(axis=-1, keepdims=True)
        mean = (centred**2).mean(axis=-1, keepdims=True)
        normed: np.ndarray = (centred / np.sqrt(mean + self.settings.norm_eps)).astype(np.float32)
        return normed * weight

    def linear(self, x: np.ndarray, name: str, scaled: str = "") -> np.ndarray:
        """x W^T + b, times the factor of this name or of `scaled`; of a fused tensor only the part
        with this name."""
        scale = falcon_scale(self.scales, scaled or name)
        first, stop, weight, bias = self._place(name)
        step = max(1, _SLICE_WEIGHTS // x.shape[1])
        starts = range(first, stop, step)
        parts = [x @ weight.rows(slice(at, min(at + step, stop))).T for at in starts]
        y = np.concatenate(parts, axis=1) * np.asarray(scale, np.float32)
        return y if bias is None else y + bias.rows(slice(first, stop))[:, 0]

    def _place(self, name: str) -> tuple[int, int, Any, Any]:
        """(first row, end, tensor, bias) of a projection."""
        if (weight := self.find(f"{name}.weight")) is not None:
            return 0, weight.n_rows, weight, self.find(f"{name}.bias")
        s, (layer, part) = self.settings, name.rsplit(".", 1)
        short = part.removesuffix("_proj")
        if match := _EXPERT.fullmatch(layer):
            fused = f"{match[1]}.{_FUSED.get(short, short)}_proj"
            weight = self.find(fused)  # (experts, rows, cols)
            height = weight.shape[1] // (2 if short in _FUSED else 1)
            first = int(match[2]) * weight.shape[1] + height * (short == "up")
            return first, first + height, weight, None
        fused = f"{layer}.{_FUSED[short]}_proj"
        weight, bias = self.find(f"{fused}.weight"), self.find(f"{fused}.bias")
        q, kv, half = s.heads * s.head_dim, s.kv_heads * s.head_dim, weight.n_rows // 2
        order = {"q": q, "k": kv, "v": kv} if short in "qkv" else {"gate": half, "up": half}
        first = sum(list(order.values())[: list(order).index(short)])
        return first, first + order[short], weight, bias


def _mixed(
    source: _Source, config: Mapping[str, Any], n: int, layer: LayerParts, x: np.ndarray
) -> np.ndarray:
    family = source.settings.family
    if not layer.is_recurrent:
        return _attention(source, config, n, x)
    inner = family.completed({**config, **(config.get("text_config") or {})})
    mixed = RECURRENT[family.recurrence](source, f"layers.{n}.", x, inner)
    return mixed + _attention(source, config, n, x) if layer.has_attention else mixed


def _attention(source: _Source, config: Mapping[str, Any], n: int, x: np.ndarray) -> np.ndarray:
    s, at = source.settings, f"layers.{n}."
    order = s.head_norm
    if s.latent:
        cos, sin = _rope_table(config, s, len(x), is_local=False)
        rope = _rope_values(config)
        return latent_attention(source, at, x, rope, lambda a: _rotated(a, cos, sin, pairs=True))

    def normed(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q_name, k_name = s.family.head_norm_names
        return source.norm(q, at, q_name), source.norm(k, at, k_name)

    q, k, v = (source.linear(x, f"{at}self_attn.{part}_proj") for part in "qkv")
    gate = None
    if s.recurrence and s.recurrence.q_rows == 2:  # a gate behind each query
        q, gate = (a.reshape(len(x), -1) for a in np.split(q.reshape(len(x), s.heads, -1), 2, 2))
    if order is HeadNorm.WHOLE:
        q, k = normed(q, k)
    q, k, v = (a.reshape(len(x), -1, s.head_dim) for a in (q, k, v))
    if order is HeadNorm.HEADS:
        q, k = normed(q, k)
    if s.has_rope(n):
        cos, sin = _rope_table(config, s, len(x), is_local=s.is_local[n])
        q, k = (_rotated(a, cos, sin, s.family.source_pairs) for a in (q, k))
    if order is HeadNorm.AFTER_ROPE:
        q, k = normed(q, k)
    if beta := _rope_values(config).get("llama_4_scaling_beta"):
        span = _rope_values(config)["original_max_position_embeddings"]
        q = q * (1 + beta * np.log(1 + np.arange(len(x)) // span))[:, None, None]
    k, v = (a.repeat(s.heads // s.kv_heads, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * s.query_scale
    scores = _capped(scores, s.caps.get("attn_logit_softcapping", 0.0))
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    visible = distance >= 0
    if s.is_local[n]:
        visible &= distance < s.window
    scores = np.where(visible, scores, -np.inf)
    if s.family.has_sinks:
        sinks = source.rows(f"{at}self_attn.sinks.weight", slice(None))
        beside = np.broadcast_to(sinks[:, None], (s.heads, len(x), 1))
        scores = np.concatenate((scores, beside), axis=2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weights = weights[:, :, : len(x)]
    mixed = np.einsum("hqk,khd->qhd", weights.astype(np.float32), v)
    mixed = mixed.reshape(len(x), -1)
    if gate is not None:
        mixed = mixed * sigmoid(gate)
    return source.linear(mixed, f"{at}self_attn.o_proj")


def _mlp(source: _Source, at: str, x: np.ndarray) -> np.ndarray:
    if not source.settings.family.has_gate:
        activated = _activated(source, source.linear(x, f"{at}mlp.up_proj"))
        return source.linear(activated.astype(np.float32), f"{at}mlp.down_proj")
    gate = _activated(source, source.linear(x, f"{at}mlp.gate_proj"))
    return source.linear(
        (gate * source.linear(x, f"{at}mlp.up_proj")).astype(np.float32), f"{at}mlp.down_proj"
    )


def _activated(source: _Source, x: np.ndarray) -> np.ndarray:
    if source.settings.family.activation == "relu2":
        return np.square(np.maximum(x, 0))
    if source.settings.family.activation == "silu":
        return x / (1 + np.exp(-x))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)  # the tanh form of GELU
    return 0.5 * x * (1 + np.tanh(inner))


def _fed(source: _Source, config: Mapping[str, Any], n: int, x: np.ndarray) -> np.ndarray:
    """What layer n adds besides its attention."""
    experts, at = source.settings.experts, f"layers.{n}."
    if experts is None or not experts.has(n):
        return _mlp(source, at, x)
    if experts.keys.takes_turns:
        return turned_experts(x, at, experts.metadata["expert_used_count"], source.find)
    return experts_forward(
        x,
        at,
        experts,
        config,
        source.linear,
        lambda name: source.rows(name, slice(None)).reshape(-1),
        lambda gate: _activated(source, gate),
    )


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairs: bool) -> np.ndarray:
    """Of the first dims of every head, as many as turn: (2i, 2i + 1) together, or (i, i + half)."""
    half = cos.shape[-1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if not pairs:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b, turned = x[..., first], x[..., second], x.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned


# -- rope -----------------------------------------------------------------------------------------


def _rope_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = {**config, **(config.get("text_config") or {})}
    values = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    return values if isinstance(values, dict) else {}


def _rope_table(
    config: Mapping[str, Any], settings: Settings, n: int, *, is_local: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 (n, 1, pairs of dims that turn)."""
    inner = {**settings.family.defaults, **config, **(config.get("text_config") or {})}
    rope = _rope_values(config)
    base = inner.get("rope_theta") or 1e4
    if is_local and settings.family.plain_local_rope:
        rope = rope.get("sliding_attention") or {}
        base = inner.get("rope_local_base_freq") or base
    rope = rope.get("full_attention") or rope
    base = rope.get("rope_theta") or base
    share = rope.get("partial_rotary_factor") or inner.get("partial_rotary_factor") or 1
    dim = int(settings.head_dim * share)
    rope = {
        "original_max_position_embeddings": inner.get("original_max_position_embeddings"),
        **rope,
    }
    angles, amplitude = _frequencies(rope, float(base), dim, settings.context, n)
    turns = np.arange(n)[:, None, None] * angles
    cos, sin = np.cos(turns) * amplitude, np.sin(turns) * amplitude
    return cos.astype(np.float32), sin.astype(np.float32)


def _frequencies(
    rope: Mapping[str, Any], base: float, dim: int, context: int, n: int
) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of dims, and what cos and sin are multiplied by; n: the
    length of the sequence."""
    plain = base ** (-np.arange(0, dim, 2) / dim)
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings") or context
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * plain / (2 * math.pi)
        share = (turns - low) / (high - low)
        blended = (1 - share) * plain / factor + share * plain
        slow, fast = turns < low, turns > high
        return np.where(slow, plain / factor, np.where(fast, plain, blended)), 1.0
    if kind == "dynamic":
        return (base * rope["alpha"] ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim), 1.0
    if kind in ("longrope", "su"):
        divisors = np.array(rope["long_factor" if n > original else "short_factor"])
        grown = max(rope.get("factor") or context / original, 1)
        amplitude = math.sqrt(1 + math.log(grown) / math.log(original))
        return plain / divisors, rope.get("attention_factor") or amplitude
    if kind == "yarn":
        bounds = [
            dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
            for beta in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        ]
        low, high = bounds
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp), _yarn_amplitude(rope, factor)
    return plain, 1.0


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor"):
        return float(rope["attention_factor"])

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)
