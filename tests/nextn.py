"""Recorded checkpoints with a block that predicts further tokens, and what it computes, in NumPy.

`transformers` leaves such blocks out, so none is recorded: here one of random weights is put behind
a checkpoint's layers, and computed from those weights by the formulas as models state them, in
float64, of one sequence at a time. Shares no code with what it judges.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .quant.checkpoints import copied, rewrite, stored_arrays
from .recorded import convert

Arrays = dict[str, np.ndarray]
# Checkpoints, and a layer whose parts the block has as well.
LIKE = {
    "deepseek2": 1,
    "deepseek2-glm": 1,
    "glm4moe": 1,
    "qwen35": 4,
    "qwen35moe": 1,
    "qwen3next": 1,
}
NAMES = tuple(LIKE)
# Where the block has an embedding and an output matrix: others than the model's, or the same.
OWN_TABLES, COPIED_TABLES = ("glm4moe",), ("deepseek2-glm",)
_TABLES = ("embed_tokens", "shared_head.head")
EPS, INNER_EPS = 1e-5, 1e-6

_FOLDER = tempfile.TemporaryDirectory(prefix="martlet-nextn-")


@functools.cache
def checkpoint(name: str) -> Path:
    folder = copied(name, Path(_FOLDER.name))
    stored = stored_arrays(folder)
    rewrite(folder, stored | {k: _bf16(v) for k, v in _block(name, stored).items()})
    return folder


@functools.cache
def gguf_of(name: str, type_: str = "F32") -> Path:
    return convert(checkpoint(name), Path(_FOLDER.name) / f"{name}-{type_}.gguf", type_)


def _bf16(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _floats(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _block(name: str, stored: Mapping[str, np.ndarray]) -> Arrays:
    """Under the names that the checkpoint would give them."""
    rng = np.random.default_rng(len(name))
    is_qwen, like = name.startswith("qwen"), f"model.layers.{LIKE[name]}."
    n_layers = 1 + max(int(key.split(".")[2]) for key in stored if ".layers." in key)
    stem = f"model.layers.{n_layers}."
    layer = "mtp.layers.0." if is_qwen else stem
    vocab, dim = stored["model.embed_tokens.weight"].shape
    shapes = {layer + k.removeprefix(like): v.shape for k, v in stored.items() if like in k}
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if not is_qwen:
        names = tuple(f"{stem}{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    shapes |= {f"{names[0]}.weight": (dim, 2 * dim)}
    shapes |= {f"{norm}.weight": (dim,) for norm in names[1:]}
    if name in OWN_TABLES:
        shapes |= {f"{stem}{part}.weight": (vocab, dim) for part in _TABLES}
    found: Arrays = {}
    for key, shape in shapes.items():
        is_norm = "norm" in key
        std = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        found[key] = rng.normal(float(is_norm and not is_qwen), std, shape)
    if name in COPIED_TABLES:
        for part in _TABLES:
            found[f"{stem}{part}.weight"] = _floats(stored["model.embed_tokens.weight"])
    return found


class Reference:
    """The block of one checkpoint. Its rows are those of one sequence, from the first on."""

    def __init__(self, name: str) -> None:
        self.config: dict[str, Any] = json.loads((checkpoint(name) / "config.json").read_text())
        arrays = {key: _floats(value) for key, value in stored_arrays(checkpoint(name)).items()}
        n, c = self.config["num_hidden_layers"], self.config
        is_qwen = name.startswith("qwen")
        stem, layer = ("mtp.", "mtp.layers.0.") if is_qwen else (f"model.layers.{n}.",) * 2
        self._layer = {k.removeprefix(layer): v for k, v in arrays.items() if k.startswith(layer)}
        parts = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        if not is_qwen:
            parts = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        self.join, self.e_norm, self.h_norm, self.norm = (
            arrays[f"{stem}{part}.weight"] for part in parts
        )
        model_table = arrays["model.embed_tokens.weight"]
        self.table = arrays.get(f"{stem}embed_tokens.weight", model_table)
        own_head = arrays.get("lm_head.weight", model_table)
        self.head = arrays.get(f"{stem}shared_head.head.weight", own_head)
        self._added = 1.0 if is_qwen else 0.0  # to norm weights
        self._attend = _latent if "kv_lora_rank" in c else _gated if is_qwen else _grouped

    def run(self, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token t + 1 and the hidden state of row t, for every row t: logits, hidden states."""
        w, rms = self._layer, self.rms
        both = (rms(self.table[tokens], self.e_norm), rms(hidden, self.h_norm))
        x = np.concatenate(both, axis=1) @ self.join.T
        x = x + self._attend(self, rms(x, w["input_layernorm.weight"]))
        x = x + self._feed(rms(x, w["post_attention_layernorm.weight"]))
        behind = rms(x, self.norm)
        return behind @ self.head.T, behind

    def rms(self, x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
        scaled = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * (weight + self._added)

    def linear(self, x: np.ndarray, part: str) -> np.ndarray:
        return x @ self._layer[f"{part}.weight"].T + self._layer.get(f"{part}.bias", 0.0)

    def head_norm(self, x: np.ndarray, part: str) -> np.ndarray:
        return self.rms(x, self._layer[f"self_attn.{part}.weight"])

    def _mlp(self, x: np.ndarray, part: str) -> np.ndarray:
        gate, up = self.linear(x, f"{part}.gate_proj"), self.linear(x, f"{part}.up_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{part}.down_proj")

    def _feed(self, x: np.ndarray) -> np.ndarray:
        c, w = self.config, self._layer
        if "mlp.gate.weight" not in w:
            return self._mlp(x, "mlp")
        scores, k = self.linear(x, "mlp.gate"), c["num_experts_per_tok"]
        bias = w.get("mlp.gate.e_score_correction_bias")
        if bias is None:
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            choice, scale = p, 1.0
        else:
            p = 1 / (1 + np.exp(-scores))
            choice, scale = p + bias, c["routed_scaling_factor"]
            groups = choice.reshape(len(x), c["n_group"], -1)
            best_two = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
            kept = np.argsort(-best_two, axis=1)[:, : c["topk_group"]]
            is_kept = np.zeros(best_two.shape, bool)
            np.put_along_axis(is_kept, kept, True, axis=1)
            choice = np.where(is_kept[:, :, None], groups, -np.inf).reshape(choice.shape)
        out = np.zeros_like(x)
        for row in range(len(x)):
            used = np.argsort(-choice[row])[:k]
            for e in used:
                weight = p[row, e] / p[row, used].sum() * scale
                out[row] += weight * self._mlp(x[row : row + 1], f"mlp.experts.{e}")[0]
        if "mlp.shared_expert_gate.weight" in w:
            share = 1 / (1 + np.exp(-self.linear(x, "mlp.shared_expert_gate")))
            return out + share * self._mlp(x, "mlp.shared_expert")
        return out + self._mlp(x, "mlp.shared_experts")


def _grouped(r: Reference, x: np.ndarray) -> np.ndarray:
    """GLM-4.5: head norms, a part of each head turns by halves."""
    q, k, v = (_heads(r.linear(x, f"self_attn.{p}_proj"), r.config["head_dim"]) for p in "qkv")
    turn = _turned(r, r.config["head_dim"], halves=True)
    q, k = turn(r.head_norm(q, "q_norm")), turn(r.head_norm(k, "k_norm"))
    mixed = _mixed(q, k, v, r.config["head_dim"] ** -0.5)
    return r.linear(mixed, "self_attn.o_proj")


def _gated(r: Reference, x: np.ndarray) -> np.ndarray:
    """Qwen 3.5: as before, with a gate behind the query of every head."""
    d = r.config["head_dim"]
    both = _heads(r.linear(x, "self_attn.q_proj"), 2 * d)
    q, gate = both[..., :d], both[..., d:].reshape(len(x), -1)
    k, v = (_heads(r.linear(x, f"self_attn.{p}_proj"), d) for p in "kv")
    turn = _turned(r, d, halves=True)
    q, k = turn(r.head_norm(q, "q_norm")), turn(r.head_norm(k, "k_norm"))
    return r.linear(_mixed(q, k, v, d**-0.5) / (1 + np.exp(-gate)), "self_attn.o_proj")


def _latent(r: Reference, x: np.ndarray) -> np.ndarray:
    """DeepSeek V3, keys and values of all heads expanded."""
    c, w = r.config, r._layer
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    low = r.rms(r.linear(x, "self_attn.q_a_proj"), w["self_attn.q_a_layernorm.weight"], INNER_EPS)
    q = _heads(r.linear(low, "self_attn.q_b_proj"), nope + rope)
    joint = r.linear(x, "self_attn.kv_a_proj_with_mqa")
    rank = c["kv_lora_rank"]
    latent = r.rms(joint[:, :rank], w["self_attn.kv_a_layernorm.weight"], INNER_EPS)
    kv = _heads(r.linear(latent, "self_attn.kv_b_proj"), nope + v_dim)
    turn = _turned(r, rope, halves=False)
    k_pe = np.broadcast_to(turn(joint[:, None, rank:]), (*kv.shape[:2], rope))
    k = np.concatenate((kv[..., :nope], k_pe), axis=2)
    q = np.concatenate((q[..., :nope], turn(q[..., nope:])), axis=2)
    scale, yarn = (nope + rope) ** -0.5, c["rope_parameters"]
    if yarn["rope_type"] == "yarn":
        scale *= (0.1 * yarn["mscale_all_dim"] * np.log(yarn["factor"]) + 1) ** 2
    return r.linear(_mixed(q, k, kv[..., nope:], scale), "self_attn.o_proj")


def _heads(x: np.ndarray, width: int) -> np.ndarray:
    return x.reshape(len(x), -1, width)


def _mixed(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of heads (n, heads, dim), of which k and v may have fewer."""
    n, heads, _ = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", p, v).reshape(n, -1)


def _turned(r: Reference, width: int, *, halves: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Rope of the first dims of heads (n, heads, width), at positions 0, 1, …"""
    rope = r.config["rope_parameters"]
    n_rot = int(width * rope.get("partial_rotary_factor", 1.0))
    i = np.arange(n_rot // 2)
    speed = rope["rope_theta"] ** (-2.0 * i / n_rot)
    if rope["rope_type"] == "yarn":  # which dims are stretched is a ramp between two ends
        original = rope["original_max_position_embeddings"]

        def dim_of(turns: float) -> float:
            wavelengths = np.log(original / (turns * 2 * np.pi))
            return float(n_rot * wavelengths / (2 * np.log(rope["rope_theta"])))

        low = max(np.floor(dim_of(rope["beta_fast"])), 0)
        high = min(np.ceil(dim_of(rope["beta_slow"])), n_rot - 1)
        stretched = np.clip((i - low) / max(high - low, 0.001), 0, 1)
        speed = speed / rope["factor"] * stretched + speed * (1 - stretched)

    def turn(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None] * speed
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned, rest = x[..., :n_rot], x[..., n_rot:]
        pairs = (turned[..., : n_rot // 2], turned[..., n_rot // 2 :])
        if not halves:
            pairs = (turned[..., 0::2], turned[..., 1::2])
        a, b = pairs
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)

    return turn
