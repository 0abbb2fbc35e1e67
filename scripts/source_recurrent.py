"""What recurrent layers of a checkpoint compute, row by row, in plain NumPy: the part of
source_forward.py that has no attention.

Owns: short convolutions (LFM2), gated delta nets (Qwen 3.5, Qwen3-Next) and Mamba-2 layers as
`transformers` 5.24 defines them. Must not know: GGUF, nor in which order a file holds heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from martlet.quant.convert_config import Settings


class Source(Protocol):
    settings: Settings

    def find(self, ending: str) -> Any: ...

    def rows(self, ending: str, index: slice | np.ndarray) -> np.ndarray: ...

    def norm(self, x: np.ndarray, at: str, name: str) -> np.ndarray: ...

    def linear(self, x: np.ndarray, name: str) -> np.ndarray: ...


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _convolved(source: Source, name: str, x: np.ndarray) -> np.ndarray:
    """Each channel with its own causal kernel; without a bias."""
    kernel = source.rows(f"{name}.weight", slice(None))
    taps = kernel.shape[1]
    padded = np.concatenate((np.zeros((taps - 1, x.shape[1]), np.float32), x))
    return sum(padded[j : j + len(x)] * kernel[:, j] for j in range(taps))


def short_convolution(source: Source, at: str, x: np.ndarray) -> np.ndarray:
    b, c, values = np.split(source.linear(x, f"{at}conv.in_proj"), 3, axis=1)
    return source.linear(c * _convolved(source, f"{at}conv.conv", b * values), f"{at}conv.out_proj")


def delta_net(source: Source, at: str, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    d, at = config["linear_key_head_dim"], f"{at}linear_attn."
    qkv, z, b, a = _delta_inputs(source, at, x, k_heads)
    mixed = _convolved(source, f"{at}conv1d", qkv)
    mixed = mixed * sigmoid(mixed)
    q, k, v = (
        part.reshape(len(x), -1, d)
        for part in np.split(mixed, [k_heads * d, 2 * k_heads * d], axis=1)
    )
    q, k = (a / np.sqrt((a * a).sum(axis=2, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (a.repeat(v_heads // k_heads, axis=1) for a in (q * d**-0.5, k))
    beta = sigmoid(b)
    a_log, dt_bias = (source.rows(f"{at}{n}", slice(None))[:, 0] for n in ("A_log", "dt_proj.bias"))
    step = np.logaddexp(0, a + dt_bias)
    decay = np.exp(-np.exp(a_log) * step)
    state, out = np.zeros((v_heads, d, d)), np.empty((len(x), v_heads, d))
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        write = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * write[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    out /= np.sqrt((out**2).mean(axis=2, keepdims=True) + source.settings.norm_eps)
    out *= source.rows(f"{at}norm.weight", slice(None))[:, 0]
    gated = out.reshape(len(x), -1) * z * sigmoid(z)
    return source.linear(gated.astype(np.float32), f"{at}out_proj")


def _delta_inputs(source: Source, at: str, x: np.ndarray, k_heads: int) -> tuple[np.ndarray, ...]:
    """[q | k | v], z, b and a; Qwen3-Next stores them for one key head after the other."""
    if source.find(f"{at}in_proj_qkvz.weight") is None:
        parts = ("qkv", "z", "b", "a")
        return tuple(source.linear(x, f"{at}in_proj_{part}") for part in parts)
    qkvz, ba = (
        source.linear(x, f"{at}in_proj_{part}").reshape(len(x), k_heads, -1)
        for part in ("qkvz", "ba")
    )
    d = source.rows(f"{at}norm.weight", slice(None)).size
    each = (qkvz.shape[2] - 2 * d) // 2
    q, k, v, z = np.split(qkvz, (d, 2 * d, 2 * d + each), axis=2)
    b, a = np.split(ba, 2, axis=2)
    qkv = np.concatenate([part.reshape(len(x), -1) for part in (q, k, v)], axis=1)
    return qkv, *(part.reshape(len(x), -1) for part in (z, b, a))


def mamba2(source: Source, at: str, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    d, n, at = config["mamba_d_head"], config["mamba_d_state"], f"{at}mamba."
    inner, bc = heads * d, groups * n
    z, xbc, dt = np.split(source.linear(x, f"{at}in_proj"), [inner, 2 * inner + 2 * bc], axis=1)
    mixed = _convolved(source, f"{at}conv1d", xbc)
    if config.get("mamba_conv_bias", True):
        mixed = mixed + source.rows(f"{at}conv1d.bias", slice(None))[:, 0]
    mixed = mixed * sigmoid(mixed)
    values, b, c = np.split(mixed, [inner, inner + bc], axis=1)
    values = values.reshape(len(x), heads, d)
    b, c = (a.reshape(len(x), groups, n).repeat(heads // groups, axis=1) for a in (b, c))
    a_log, skip, dt_bias = (
        source.rows(f"{at}{name}", slice(None))[:, 0] for name in ("A_log", "D", "dt_proj.bias")
    )
    dt = np.logaddexp(0, dt + dt_bias)
    decay = np.exp(-np.exp(a_log) * dt)
    state, out = np.zeros((heads, d, n)), np.empty((len(x), heads, d))
    for t in range(len(x)):
        written = dt[t, :, None, None] * values[t, :, :, None] * b[t, :, None, :]
        state = decay[t, :, None, None] * state + written
        out[t] = np.einsum("hdn,hn->hd", state, c[t]) + skip[:, None] * values[t]
    gated = out.reshape(len(x), -1) * z * sigmoid(z)
    if config.get("mamba_rms_norm", True):
        grouped = gated.reshape(len(x), groups, -1)
        grouped /= np.sqrt((grouped**2).mean(axis=2, keepdims=True) + source.settings.norm_eps)
        gated = grouped.reshape(gated.shape) * source.rows(f"{at}norm.weight", slice(None))[:, 0]
    return source.linear(gated.astype(np.float32), f"{at}out_proj")


def falcon_scale(config: Mapping[str, Any], name: str) -> float | np.ndarray:
    """What Falcon-H1 multiplies the results of a projection by, its inputs' factor included; 1
    where the config has no factors."""
    part = name.rsplit(".", 1)[-1]
    if name.endswith("mamba.in_proj") and "ssm_multipliers" in config:
        inner, bc = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = (inner, inner, bc, bc, config["mamba_n_heads"])
        ssm_in = config.get("ssm_in_multiplier", 1.0)
        return np.repeat(config["ssm_multipliers"], widths) * ssm_in
    if part in ("gate_proj", "down_proj") and "mlp_multipliers" in config:
        return float(config["mlp_multipliers"][part == "down_proj"])
    scale = 1.0
    for key in _SCALED_BY.get(part, ()):
        scale *= config.get(key, 1.0)
    return scale


_SCALED_BY = {
    "embed_tokens": ("embedding_multiplier",),
    "q_proj": ("attention_in_multiplier",),
    "k_proj": ("attention_in_multiplier", "key_multiplier"),
    "v_proj": ("attention_in_multiplier",),
    "o_proj": ("attention_out_multiplier",),
    "out_proj": ("ssm_out_multiplier",),
    "lm_head": ("lm_head_multiplier",),
}


LAYERS: dict[str, Callable[..., np.ndarray]] = {
    "short convolution": lambda source, at, x, config: short_convolution(source, at, x),
    "delta net": delta_net,
    "grouped delta net": delta_net,
    "Mamba-2": mamba2,
    "Mamba-2 beside attention": mamba2,
    "Mamba-2 in layers of one part": mamba2,
}
