"""The arithmetic of ops on whole arrays, in NumPy: what reference.py's ops are written with.

Must not know ops, plans or weights. All arrays are float32; rows do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ops import Q8_BLOCK, Activation, Gating, RopeStyle


@dataclass
class Q8Rows:
    """Quantized activations: value = q * d of its block of 32."""

    q: np.ndarray  # (n, width) int8
    d: np.ndarray  # (n, width / 32) float32

    def floats(self) -> np.ndarray:
        return self.q.astype(np.float32) * np.repeat(self.d, Q8_BLOCK, axis=1)


def quantize_q8(x: np.ndarray) -> Q8Rows:
    """Blocks of 32 with d = max|x| / 127; a block of zeros has d = 0."""
    n, width = x.shape
    blocks = x.reshape(n, width // Q8_BLOCK, Q8_BLOCK)
    amax = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / amax
        # Where the inverse overflows, the block is zero for any purpose.
        is_zero = np.isinf(inverse)
        inverse[is_zero] = 0
        d = np.where(is_zero, np.float32(0), amax / np.float32(127))
        q = np.rint(blocks * inverse[:, :, None]).astype(np.int8)
    return Q8Rows(q.reshape(n, width), d)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest float32 whose lower 16 bits are 0, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    kept = np.where(np.isnan(x), bits | np.uint32(0x400000), nearest)
    return (kept & np.uint32(0xFFFF0000)).view(np.float32)


def round_q8_0(x: np.ndarray) -> np.ndarray:
    """Heads (n, heads, dim) as a Q8_0 cache holds them: per 32 values d = float16(max|x| / 127),
    q = round_half_even(x / d), value q * d."""
    n, heads, dim = x.shape
    padded = np.zeros((n, heads, -(-dim // Q8_BLOCK), Q8_BLOCK), np.float32)
    padded.reshape(n, heads, -1)[:, :, :dim] = x
    amax = np.abs(padded).max(axis=3, keepdims=True)
    d = np.minimum(amax / np.float32(127), np.float32(65504)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
        q = np.clip(np.rint(padded * inverse), -127, 127)
    return (q * d).reshape(n, heads, -1)[:, :, :dim]


def rms_norm(
    x: np.ndarray,
    weight: np.ndarray | None,
    group: int,
    eps: float,
    *,
    bias: np.ndarray | None = None,
    centered: bool = False,
) -> np.ndarray:
    """Per group of values of the last axis, without their mean where centered; weight and bias are
    as long as one group or the whole row."""
    groups = x.reshape(len(x), x.shape[1] // group, group)  # -1 fails without rows
    if centered:
        groups = groups - np.mean(groups, axis=2, keepdims=True, dtype=np.float32)
    mean_square = np.mean(groups * groups, axis=2, keepdims=True, dtype=np.float32)
    normed = groups / np.sqrt(mean_square + np.float32(eps))
    if weight is not None:
        normed = normed * weight.reshape(-1, group)
    if bias is not None:
        normed = normed + bias.reshape(-1, group)
    return normed.reshape(x.shape)


def rotate(heads: np.ndarray, trig: np.ndarray, style: RopeStyle, first_dim: int = 0) -> np.ndarray:
    """Turns n_rot dims of heads (n, n_heads, head_dim), from first_dim on, by trig (n, n_rot)."""
    end = first_dim + trig.shape[1]
    cos, sin = trig[:, None, 0::2], trig[:, None, 1::2]
    if style is RopeStyle.PAIR:
        first, second = slice(first_dim, end, 2), slice(first_dim + 1, end, 2)
    else:
        middle = (first_dim + end) // 2
        first, second = slice(first_dim, middle), slice(middle, end)
    a, b = heads[:, :, first], heads[:, :, second]
    turned = heads.copy()
    turned[:, :, first] = a * cos - b * sin
    turned[:, :, second] = a * sin + b * cos
    return turned


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return x / (np.float32(1) + np.exp(-x))


def clamped_glu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gpt-oss: gate and up are cut off at 7, the gate is that of quick gelu, and up is one more."""
    gate = np.minimum(gate, np.float32(7))
    up = np.clip(up, np.float32(-7), np.float32(7))
    return gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1))


def softmax(x: np.ndarray) -> np.ndarray:
    """Of each row."""
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def best_groups(scores: np.ndarray, groups: int, used: int) -> np.ndarray:
    """Scores of the groups with the best pairs; -inf in all others."""
    grouped = scores.reshape(len(scores), groups, -1)
    worth = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-worth, axis=1, kind="stable")[:, :used]
    kept = np.full_like(grouped, -np.inf)
    rows = np.arange(len(scores))[:, None]
    kept[rows, best] = grouped[rows, best]
    return kept.reshape(scores.shape)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))
    return (0.5 * x * (1 + erf)).astype(np.float32)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)


def convolve(rows: np.ndarray, kernel: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """rows (taps - 1 + n, channels), kernel (channels, taps): the last n of causal sums."""
    taps = kernel.shape[1]
    n = len(rows) - taps + 1
    total = np.zeros((n, rows.shape[1]), np.float32) + (0 if bias is None else bias)
    for j in range(taps):
        total = total + kernel[:, j] * rows[j : j + n]
    return total.astype(np.float32)


def soft_capped(x: np.ndarray, cap: float) -> np.ndarray:
    """cap * tanh(x / cap); cap 0: x."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One row's heads (heads, head_dim) over gathered k, v (n_keys, kv_heads, dim); sinks (heads,)
    are scores whose values are 0."""
    kv_heads = k.shape[1]
    grouped = q.reshape(kv_heads, -1, q.shape[1])  # neighbouring query heads share a kv head
    out = []
    for h in range(kv_heads):
        scores = (grouped[h] @ k[:, h].T) * np.float32(scale)  # (group, n_keys)
        scores = soft_capped(scores, cap)
        if sinks is not None:
            scores = np.column_stack((scores, sinks.reshape(kv_heads, -1)[h]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out.append(weights[:, : len(v)] @ v[:, h] / weights.sum(axis=1, keepdims=True))
    return np.concatenate(out)


_ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.SIGMOID: sigmoid,
    Activation.IDENTITY: lambda x: x,
    Activation.GELU_ERF: gelu_erf,
    Activation.TANH: np.tanh,
    Activation.RELU2: lambda x: np.square(np.maximum(x, 0)),
}
GATES: dict[Gating, Callable[[np.ndarray], np.ndarray]] = {
    Gating.SOFTMAX: softmax,
    Gating.SIGMOID: sigmoid,
    Gating.CHOSEN: lambda logits: logits,
}


def gated(activation: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation == Activation.CLAMPED:
        return clamped_glu(gate, up)
    return activated(activation, gate) * up


def activated(activation: int, x: np.ndarray) -> np.ndarray:
    return _ACTIVATIONS[Activation(activation)](x)
