"""Shapes of well-known models: their sizes, the tensors these give, and the metadata of the file.
Owns the table of shapes; must not know how a file is written, or in which formats.

Facts: the models' published configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from martlet.quant.convert_latent import SourceLatent
from martlet.quant.dense_keys import dense_keys
from martlet.quant.errors import MartletError
from martlet.scripts.shapes_recurrent import RecurrentShape


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
    experts: int = 0  # of every layer but the first n_dense
    used: int = 0
    n_dense: int = 0
    expert_dim: int = 0  # 0: as wide as a dense layer
    shared: int = 0  # experts that every row meets
    gating: int = 0  # as files number it; 0: they leave it unsaid
    latent: SourceLatent | None = None  # sizes of compressed keys, instead of kv_heads, head_dim
    recurrent: RecurrentShape | None = None

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
            **(self.latent.metadata if self.latent else {}),
        }
        if self.recurrent:
            values |= self.recurrent.metadata(self.n_layers, self.kv_heads)
        if self.window:
            values["attention.sliding_window"] = self.window
        if self.arch == "gpt-oss":
            values |= _YARN
        if self.experts:
            values["expert_count"], values["expert_used_count"] = self.experts, self.used
            values["expert_feed_forward_length"] = self.expert_dim or self.ffn_dim
            values |= {
                key: value
                for key, value in (
                    ("leading_dense_block_count", self.n_dense),
                    ("expert_shared_count", self.shared),
                    ("expert_gating_func", self.gating),
                )
                if value
            }
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names with (rows, cols), of experts (experts, rows, cols), or (n,) for norms."""
        yield "token_embd.weight", (self.vocab_size, self.dim)
        for n in range(self.n_layers):
            layer = {"attn_norm.weight": (self.dim,), **self._mixer(n)}
            layer |= {f"{stem}.weight": size for stem, size in self._feed_forward(n).items()}
            yield from ((f"blk.{n}.{name}", size) for name, size in layer.items())
        yield "output_norm.weight", (self.dim,)
        if not self.is_tied:
            yield "output.weight", (self.vocab_size, self.dim)

    def _mixer(self, n: int) -> dict[str, tuple[int, ...]]:
        if self.recurrent and n not in self.recurrent.attention:
            return self.recurrent.tensors(self.dim)
        return {f"{stem}.weight": size for stem, size in self._attention().items()}

    def _attention(self) -> dict[str, tuple[int, ...]]:
        if self.latent:
            sizes = {"dim": self.dim, **self.latent.sizes()}
            parts = self.latent.parts().items()
            return {_LATENT_STEMS[name]: tuple(sizes[dim] for dim in dims) for name, dims in parts}
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_q": (q_rows * (2 if self.arch == "qwen35" else 1), self.dim),
            "attn_k": (kv_rows, self.dim),
            "attn_v": (kv_rows, self.dim),
            "attn_output": (self.dim, q_rows),
        }
        if self.arch in ("gemma3", "qwen3moe", "qwen35"):
            layer |= {f"attn_{k}_norm": (self.head_dim,) for k in "qk"}
        if self.arch == "gemma3":
            layer |= {f"post_{k}_norm": (self.dim,) for k in ("attention", "ffw")}
        if self.arch == "gpt-oss":
            layer["attn_sinks"] = (self.heads,)
        return layer

    def _feed_forward(self, n: int) -> dict[str, tuple[int, ...]]:
        norm = "post_attention_norm" if self.arch in ("qwen35", "gpt-oss") else "ffn_norm"
        layer: dict[str, tuple[int, ...]] = {norm: (self.dim,)}
        if not self.experts or n < self.n_dense:
            return layer | self._gated("", (), self.ffn_dim)
        width = self.expert_dim or self.ffn_dim
        layer["ffn_gate_inp"] = (self.experts, self.dim)
        layer |= self._gated("_exps", (self.experts,), width)
        return layer | (self._gated("_shexp", (), self.shared * width) if self.shared else {})

    def _gated(self, suffix: str, stack: tuple[int, ...], width: int) -> dict[str, tuple[int, ...]]:
        sides = {"gate": (width, self.dim), "up": (width, self.dim), "down": (self.dim, width)}
        return {f"ffn_{part}{suffix}": (*stack, *shape) for part, shape in sides.items()}


_LATENT_STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.o_proj": "attn_output",
}

# Of gpt-oss.
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
# vocab_size, context, rope_base, norm_eps
_LLAMA3 = (128256, 131072, 5e5, 1e-5)
_SMOLLM2 = (49152, 8192, 1e5, 1e-5)
_QWEN3 = (151936, 40960, 1e6, 1e-6)
_MIXTRAL = (32000, 32768, 1e6, 1e-5)
_GEMMA3 = (262144, 32768, 1e6, 1e-6)
_QWEN35 = (248320, 262144, 1e7, 1e-6)
_GPT_OSS = (201088, 131072, 150000.0, 1e-5)
_GRANITE4 = (100352, 131072, 1e4, 1e-5)
_DEEPSEEK2 = (102400, 163840, 1e4, 1e-6)
_GLM4_FLASH = (154880, 202752, 1e6, 1e-5)
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
        Shape(
            *("gpt-oss-20b", "gpt-oss", 2880, 2880, 24, 64, 8, 64, *_GPT_OSS, False),
            window=128,
            experts=32,
            used=4,
        ),
        Shape(
            *("qwen3.5-0.8b", "qwen35", 1024, 3584, 24, 8, 2, 256, *_QWEN35),
            recurrent=RecurrentShape(tuple(range(3, 24, 4)), 16, 16, 128, 128, is_delta=True),
        ),
        Shape(
            *("granite-4-h-micro", "granitehybrid", 2048, 8192, 40, 32, 8, 64, *_GRANITE4),
            recurrent=RecurrentShape((5, 15, 25, 35), 1, 64, 128, 64, is_delta=False),
        ),
        Shape(
            *("deepseek-v2-lite", "deepseek2", 2048, 10944, 27, 16, 1, 64, *_DEEPSEEK2, False),
            experts=64,
            used=6,
            n_dense=1,
            expert_dim=1408,
            shared=2,
            latent=SourceLatent(512, 0, 16, key_dim=128, n_rot=64, value_dim=128),
            gating=1,
        ),
        Shape(
            *("glm-4.7-flash", "deepseek2", 2048, 10240, 47, 20, 1, 64, *_GLM4_FLASH, False),
            experts=64,
            used=4,
            n_dense=1,
            expert_dim=1536,
            shared=1,
            latent=SourceLatent(512, 768, 20, key_dim=192, n_rot=64, value_dim=256),
            gating=2,
        ),
    )
}


class UnknownShape(MartletError):
    """No such shape in the table."""


def find_shape(name: str) -> Shape:
    if name not in SHAPES:
        raise UnknownShape(f"no shape is called {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]
