"""Tiny random models in memory, and a driver that feeds an executor token by token or in chunks.

Used by every executor's tests: weights of any block format with sane scales, no file needed.
Plans of a single op are in op_cases.py.

    model = tiny_model("gemma3", formats=("Q4_K", "Q6_K"))
    executor = ReferenceExecutor(model.plan(), model.weights, n_blocks=8)
    logits = run_tokens(executor, [1, 2, 3])  # (3, vocab_size)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from martlet.quant.formats import FORMATS
from martlet.quant.random_blocks import BLOCK_FORMATS as BLOCK_FORMATS
from martlet.quant.random_blocks import random_weights
from martlet.runtime.config import ModelConfig
from martlet.runtime.executors import Executor
from martlet.runtime.models import record_plan
from martlet.runtime.plan import Plan
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredTensor, StoredWeights

FLOAT_FORMATS = ("F32", "F16", "BF16")


def random_tensor(
    format_name: str, shape: tuple[int, ...], rng: np.random.Generator, std: float = 1.0
) -> StoredTensor:
    """Weights of about this standard deviation: random bits, scales of either sign."""
    data = random_weights(format_name, math.prod(shape), rng, std)
    return StoredTensor(FORMATS[format_name], shape, data)


@dataclass(frozen=True)
class TinyDims:
    """Multiples of 256 where K-quants shall fit; any multiple of 32 for the older formats."""

    dim: int = 256
    ffn_dim: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    n_layers: int = 2
    vocab_size: int = 300
    context: int = 512
    window: int = 20  # gemma3 only: even layers are local, odd ones global
    n_experts: int = 5  # of architectures with experts alone, where ffn_dim is their width
    n_used: int = 2


@dataclass(frozen=True)
class TinyModel:
    config: ModelConfig
    weights: StoredWeights

    def plan(self, max_rows: int = 64) -> Plan:
        return record_plan(self.config, self.weights, max_rows)


def tiny_metadata(arch: str, dims: TinyDims) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": dims.n_layers,
        "context_length": dims.context,
        "embedding_length": dims.dim,
        "feed_forward_length": dims.ffn_dim,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6 if arch == "gemma3" else 1e4,
    }
    if arch.endswith("moe"):
        values["expert_count"], values["expert_used_count"] = dims.n_experts, dims.n_used
        values["expert_feed_forward_length"] = dims.ffn_dim
    if arch == "qwen2moe":
        values["expert_shared_feed_forward_length"] = dims.ffn_dim
    if arch == "gemma3":
        values["attention.sliding_window"] = dims.window
        values["attention.sliding_window_pattern"] = 2
    named = {f"{arch}.{key}": value for key, value in values.items()}
    return {"general.architecture": arch, "general.name": f"tiny {arch}", **named}


def tiny_model(
    arch: str = "llama",
    *,
    formats: Sequence[str] = ("Q8_0",),
    dims: TinyDims | None = None,
    seed: int = 0,
    tied: bool = True,
) -> TinyModel:
    """A model whose matrices take the given formats in turn; norms and biases are F32."""
    dims = dims or TinyDims()
    rng = np.random.default_rng(seed)
    turn = cycle(formats)
    tensors = {}
    for name, shape in _shapes(arch, dims, tied):
        if name.endswith("ffn_gate_inp.weight"):
            tensors[name] = random_tensor("F32", shape, rng, shape[1] ** -0.5)
        elif len(shape) >= 2:
            std = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
            tensors[name] = random_tensor(next(turn), shape, rng, std)
        elif name.endswith("norm.weight"):
            tensors[name] = StoredTensor.from_floats(rng.uniform(0.5, 1.5, shape))
        else:
            tensors[name] = random_tensor("F32", shape, rng, 0.2)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = ModelConfig.from_metadata(tiny_metadata(arch, dims), shapes)
    return TinyModel(config, StoredWeights(tensors))


def _shapes(arch: str, d: TinyDims, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (d.vocab_size, d.dim)
    for n in range(d.n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d.dim,),
            "attn_q.weight": (d.heads * d.head_dim, d.dim),
            "attn_k.weight": (d.kv_heads * d.head_dim, d.dim),
            "attn_v.weight": (d.kv_heads * d.head_dim, d.dim),
            "attn_output.weight": (d.dim, d.heads * d.head_dim),
            "ffn_norm.weight": (d.dim,),
            **_ffn_shapes(arch, d),
        }
        if arch in ("qwen2", "qwen2moe"):
            layer |= {f"attn_{k}.bias": layer[f"attn_{k}.weight"][:1] for k in "qkv"}
        if arch in ("qwen3", "qwen3moe", "gemma3"):
            layer |= {f"attn_{k}_norm.weight": (d.head_dim,) for k in "qk"}
        if arch == "gemma3":
            layer |= {f"post_{k}_norm.weight": (d.dim,) for k in ("attention", "ffw")}
        yield from ((f"blk.{n}.{stem}", shape) for stem, shape in layer.items())
    yield "output_norm.weight", (d.dim,)
    if not tied:
        yield "output.weight", (d.vocab_size, d.dim)


def _ffn_shapes(arch: str, d: TinyDims) -> dict[str, tuple[int, ...]]:
    parts = {"gate": (d.ffn_dim, d.dim), "up": (d.ffn_dim, d.dim), "down": (d.dim, d.ffn_dim)}
    if not arch.endswith("moe"):
        return {f"ffn_{part}.weight": shape for part, shape in parts.items()}
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (d.n_experts, d.dim)}
    shapes |= {f"ffn_{part}_exps.weight": (d.n_experts, *shape) for part, shape in parts.items()}
    if arch == "qwen2moe":
        shapes["ffn_gate_inp_shexp.weight"] = (d.dim,)
        shapes |= {f"ffn_{part}_shexp.weight": shape for part, shape in parts.items()}
    return shapes


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in a step: its new tokens, how many came before, and its blocks."""

    tokens: Sequence[int]
    n_past: int
    blocks: Sequence[int]


def make_step(chunks: Sequence[Chunk], out_rows: Sequence[int] | None = None) -> Step:
    """One step of these chunks; by default the logits of every row are wanted."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    n_rows = sum(lengths)
    table = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    positions = [c.n_past + i for c in chunks for i in range(len(c.tokens))]
    return Step(
        tokens=np.array([t for chunk in chunks for t in chunk.tokens], np.int32),
        positions=np.array(positions, np.int32),
        seq_start=np.cumsum([0, *lengths], dtype=np.int32),
        block_table=table,
        out_rows=np.array(range(n_rows) if out_rows is None else out_rows, np.int32),
    )


def run_tokens(
    executor: Executor, tokens: Sequence[int], *, chunk: int = 0, blocks: Sequence[int] = ()
) -> np.ndarray:
    """Logits of all positions of one sequence, fed `chunk` rows at a time (0: as many as fit)."""
    chunk = chunk or executor.max_rows
    blocks = blocks or range(-(-len(tokens) // executor.block_tokens))
    logits = [
        executor.run(make_step([Chunk(tokens[at : at + chunk], at, blocks)]))
        for at in range(0, len(tokens), chunk)
    ]
    return np.concatenate(logits)
