"""nomic-bert-moe, which no class of transformers is, against its formula in plain NumPy."""

from __future__ import annotations

from dataclasses import replace
from math import erf
from typing import Any

import numpy as np
import pytest
from martlet.runtime.config import ModelConfig
from martlet.runtime.executors.choice import create_executor
from martlet.runtime.models import record_plan, unused_tensors
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import RELATIVE_ERROR, relative_error
from .test_oracle import executor as executor
from .tiny import Chunk, make_step

DIM, HEADS, FFN, LAYERS, VOCAB = 32, 4, 64, 4, 50
EXPERTS, USED, EVERY, BASE, EPS = 5, 2, 2, 1000.0, 1e-5
METADATA: dict[str, Any] = {
    "general.architecture": "nomic-bert-moe",
    **{
        f"nomic-bert-moe.{key}": value
        for key, value in {
            "block_count": LAYERS,
            "context_length": 64,
            "embedding_length": DIM,
            "feed_forward_length": FFN,
            "attention.head_count": HEADS,
            "attention.layer_norm_epsilon": EPS,
            "attention.causal": False,
            "rope.freq_base": BASE,
            "pooling_type": 1,
            "moe_every_n_layers": EVERY,
            "expert_count": EXPERTS,
            "expert_used_count": USED,
        }.items()
    },
}


def random_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, DIM),
        "token_types.weight": (1, DIM),
    }
    norms = ["token_embd_norm"]
    for n in range(LAYERS):
        at = f"blk.{n}."
        norms += [f"{at}attn_output_norm", f"{at}layer_output_norm"]
        shapes |= {f"{at}attn_qkv.weight": (3 * DIM, DIM), f"{at}attn_qkv.bias": (3 * DIM,)}
        shapes |= {f"{at}attn_output.weight": (DIM, DIM), f"{at}attn_output.bias": (DIM,)}
        if n % EVERY == 1:
            shapes[f"{at}ffn_gate_inp.weight"] = (EXPERTS, DIM)
            shapes[f"{at}ffn_up_exps.weight"] = (EXPERTS, FFN, DIM)
            shapes[f"{at}ffn_down_exps.weight"] = (EXPERTS, DIM, FFN)
        else:
            shapes |= {f"{at}ffn_up.weight": (FFN, DIM), f"{at}ffn_up.bias": (FFN,)}
            shapes |= {f"{at}ffn_down.weight": (DIM, FFN), f"{at}ffn_down.bias": (DIM,)}
    shapes |= {f"{name}.{kind}": (DIM,) for name in norms for kind in ("weight", "bias")}
    return {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5 * (2 if "gate_inp" in name else 1))
        for name, shape in shapes.items()
    }


def expected(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    gelu = np.vectorize(lambda a: 0.5 * a * (1 + erf(a / 2**0.5)))

    def rotated(x: np.ndarray) -> np.ndarray:
        half = x.shape[2] // 2
        angles = np.arange(len(x))[:, None, None] * BASE ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=2)

    x = norm(w["token_embd.weight"][ids] + w["token_types.weight"][0], "token_embd_norm")
    for n in range(LAYERS):
        at = f"blk.{n}."
        q, k, v = (
            a.reshape(len(x), HEADS, -1) for a in np.split(linear(x, f"{at}attn_qkv"), 3, axis=1)
        )
        q, k = rotated(q), rotated(k)
        scores = np.exp(np.einsum("qhd,khd->hqk", q, k) / (DIM // HEADS) ** 0.5)
        scores /= scores.sum(axis=2, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(x.shape)
        x = norm(x + linear(mixed, f"{at}attn_output"), f"{at}attn_output_norm")
        if n % EVERY == 1:
            p = np.exp(x @ w[f"{at}ffn_gate_inp.weight"].T)
            p /= p.sum(axis=1, keepdims=True)
            fed = np.zeros_like(x)
            for row in range(len(x)):
                for e in np.argsort(-p[row])[:USED]:  # not made to add up to 1
                    inner = gelu(w[f"{at}ffn_up_exps.weight"][e] @ x[row])
                    fed[row] += p[row, e] * (w[f"{at}ffn_down_exps.weight"][e] @ inner)
        else:
            fed = linear(gelu(linear(x, f"{at}ffn_up")), f"{at}ffn_down")
        x = norm(x + fed, f"{at}layer_output_norm")
    return x


def test_every_executor_equals_the_formula_in_any_company(executor: str) -> None:
    values = random_weights()
    weights = StoredWeights({name: StoredTensor.from_floats(v) for name, v in values.items()})
    shapes = {name: v.shape for name, v in values.items()}
    config = ModelConfig.from_metadata(METADATA, shapes)
    assert [layer.experts is not None for layer in config.layers] == [False, True] * 2
    plan = record_plan(config, weights, max_rows=64)
    assert unused_tensors(plan, weights, config) == []
    ids = [int(i) for i in np.random.default_rng(3).integers(0, VOCAB, 19)]
    runner, _ = create_executor(
        executor, plan, weights, n_blocks=8, block_tokens=16, kv_type=KvType.F32
    )
    rows = np.arange(len(ids), dtype=np.int32)
    try:
        step = make_step([Chunk(ids, 0, [0, 1])], out_rows=[])
        runner.run(replace(step, hidden_rows=rows))
        alone = runner.hidden.copy()
        step = make_step([Chunk(ids[:5], 0, [7]), Chunk(ids, 0, [5, 3])], out_rows=[])
        runner.run(replace(step, hidden_rows=rows + 5))
        np.testing.assert_array_equal(runner.hidden, alone)
    finally:
        runner.close()
    assert relative_error(alone, expected(values, ids)) < RELATIVE_ERROR


@pytest.mark.parametrize(("every", "has"), [(0, [True] * 4), (3, [False, True, False, False])])
def test_which_layers_have_experts(every: int, has: list[bool]) -> None:
    changed = {**METADATA, "nomic-bert-moe.moe_every_n_layers": every}
    config = ModelConfig.from_metadata(changed, {"token_embd.weight": (VOCAB, DIM)})
    assert [layer.experts is not None for layer in config.layers] == has
