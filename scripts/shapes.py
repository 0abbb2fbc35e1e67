"""Shapes of well-known models: their sizes, the tensors these give, and the metadata of the file.
Owns the table of shapes; must not know how a file is written, or in which formats.

Facts: the models' published configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from martlet.quant.dense_keys import dense_keys
from martlet.quant.errors import MartletError


@dataclass(frozen=True)
class Shape:
    name: str
    arch: str
    dim: int
    ffn_dim: int
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    rope_base: float
    norm_eps: float
    is_tied: bool = True
    window: int = 0
    experts: int = 0  # of every layer, each ffn_dim wide
    used: int = 0

    def metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            **dense_keys(
                n_layers=self.n_layers,
                context=self.context,
                dim=self.dim,
                ffn_dim=self.ffn_dim,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                norm_eps=self.norm_eps,
            ),
            "rope.freq_base": self.rope_base,
            "vocab_size": self.vocab_size,
        }
        if self.window:
            values["attention.sliding_window"] = self.window
        if self.experts:
            values["expert_count"], values["expert_used_count"] = self.experts, self.used
            values["expert_feed_forward_length"] = self.ffn_dim
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names with (rows, cols), of experts (experts, rows, cols), or (n,) for norms."""
        yield "token_embd.weight", (self.vocab_size, self.dim)
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.dim,),
            "attn_q": (q_rows, self.dim),
            "attn_k": (kv_rows, self.dim),
            "attn_v": (kv_rows, self.dim),
            "attn_output": (self.dim, q_rows),
            "ffn_norm": (self.dim,),
        }
        suffix, stack = ("_exps", (self.experts,)) if self.experts else ("", ())
        if self.experts:
            layer["ffn_gate_inp"] = (self.experts, self.dim)
        layer |= {
            f"ffn_{part}{suffix}": (*stack, self.ffn_dim, self.dim) for part in ("gate", "up")
        }
        layer[f"ffn_down{suffix}"] = (*stack, self.dim, self.ffn_dim)
        if self.arch in ("gemma3", "qwen3moe"):
            layer |= {f"attn_{k}_norm": (self.head_dim,) for k in "qk"}
        if self.arch == "gemma3":
            layer |= {f"post_{k}_norm": (self.dim,) for k in ("attention", "ffw")}
        for n in range(self.n_layers):
            yield from ((f"blk.{n}.{stem}.weight", size) for stem, size in layer.items())
        yield "output_norm.weight", (self.dim,)
        if not self.is_tied:
            yield "output.weight", (self.vocab_size, self.dim)


# vocab_size, context, rope_base, norm_eps
_LLAMA3 = (128256, 131072, 5e5, 1e-5)
_SMOLLM2 = (49152, 8192, 1e5, 1e-5)
_QWEN3 = (151936, 40960, 1e6, 1e-6)
_MIXTRAL = (32000, 32768, 1e6, 1e-5)
_GEMMA3 = (262144, 32768, 1e6, 1e-6)
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (  # dim, ffn_dim, n_layers, heads, kv_heads, head_dim
        Shape("llama-1b", "llama", 2048, 8192, 16, 32, 8, 64, *_LLAMA3),
        Shape("llama-3b", "llama", 3072, 8192, 28, 24, 8, 128, *_LLAMA3),
        Shape("llama-8b", "llama", 4096, 14336, 32, 32, 8, 128, *_LLAMA3, is_tied=False),
        Shape("smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, *_SMOLLM2),
        Shape("qwen3-30b-a3b", "qwen3moe", 2048, 768, 48, 32, 4, 128, *_QWEN3, False, 0, 128, 8),
        Shape("mixtral-8x7b", "llama", 4096, 14336, 32, 32, 8, 128, *_MIXTRAL, False, 0, 8, 2),
        Shape("gemma3-270m", "gemma3", 640, 2048, 18, 4, 1, 256, *_GEMMA3, window=512),
    )
}


class UnknownShape(MartletError):
    """No such shape in the table."""


def find_shape(name: str) -> Shape:
    if name not in SHAPES:
        raise UnknownShape(f"no shape is called {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]
