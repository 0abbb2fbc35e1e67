"""What gpt-oss's experts compute, from the checkpoint's own stacks, in plain NumPy.

Owns: the choice among logits, gate and up in turns, MXFP4 as two tensors, as `transformers` 5.24
defines them. Must not know: GGUF, attention, files. Called by source_forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ALPHA, _LIMIT = np.float32(1.702), np.float32(7.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of FP4; the top bit is the sign

Find = Callable[[str], Any]  # a stored tensor by the end of its name, or None


def turned_experts(x: np.ndarray, at: str, used: int, find: Find) -> np.ndarray:
    """x (n, dim); `at` is the layer's prefix."""
    at = f"{at}mlp."
    router, bias = find(f"{at}gate.weight"), find(f"{at}gate.bias")
    logits = x @ router.rows(slice(None)).T + bias.rows(slice(None))[:, 0]
    ids = np.argsort(-logits, axis=1)[:, :used]
    chosen = np.take_along_axis(logits, ids, axis=1)
    weights = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = np.zeros_like(x)
    for e in range(logits.shape[1]):
        rows, places = np.nonzero(ids == e)
        if not rows.size:
            continue
        both = _product(x[rows], f"{at}experts.gate_up_proj", e, find)
        gate = np.minimum(both[:, ::2], _LIMIT)
        up = np.clip(both[:, 1::2], -_LIMIT, _LIMIT)
        gated = gate / (1 + np.exp(-_ALPHA * gate)) * (up + 1)
        down = _product(gated.astype(np.float32), f"{at}experts.down_proj", e, find)
        out[rows] += weights[rows, places, None] * down
    return out


def _product(x: np.ndarray, name: str, e: int, find: Find) -> np.ndarray:
    n_in = x.shape[1]
    if (stack := find(name)) is not None:
        matrix = stack.rows(slice(e * n_in, (e + 1) * n_in))
    else:
        blocks, scales = find(f"{name}_blocks"), find(f"{name}_scales")
        codes = blocks.data.reshape(blocks.shape)[e].astype(np.int64)
        exponents = scales.data.reshape(scales.shape)[e].astype(np.int64)
        signed = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
        pairs = np.stack((signed[codes % 16], signed[codes // 16]), axis=-1)
        values = np.ldexp(pairs.reshape(*exponents.shape, 32), exponents[..., None] - 127)
        matrix = values.reshape(len(exponents), n_in).T
    product: np.ndarray = x @ matrix + find(f"{name}_bias").rows(slice(e, e + 1))
    return product.astype(np.float32)
