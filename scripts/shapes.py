"""Shapes of well-known models: their sizes, the tensors these give, and the metadata of the file.
Owns the table of shapes and the mixtures of formats; must not know how a file is written.

Facts: the models' published configurations; mixtures and fallbacks as llama-quantize chooses them
(src/llama-quant.cpp of llama.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from martlet.quant.errors import MartletError
from martlet.quant.formats import FORMATS


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

    def metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "block_count": self.n_layers,
            "context_length": self.context,
            "embedding_length": self.dim,
            "feed_forward_length": self.ffn_dim,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_base,
            "vocab_size": self.vocab_size,
        }
        if self.window:
            values["attention.sliding_window"] = self.window
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names with (rows, cols), or (n,) for norms."""
        yield "token_embd.weight", (self.vocab_size, self.dim)
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.dim,),
            "attn_q": (q_rows, self.dim),
            "attn_k": (kv_rows, self.dim),
            "attn_v": (kv_rows, self.dim),
            "attn_output": (self.dim, q_rows),
            "ffn_norm": (self.dim,),
            "ffn_gate": (self.ffn_dim, self.dim),
            "ffn_up": (self.ffn_dim, self.dim),
            "ffn_down": (self.dim, self.ffn_dim),
        }
        if self.arch == "gemma3":
            layer |= {f"attn_{k}_norm": (self.head_dim,) for k in "qk"}
            layer |= {f"post_{k}_norm": (self.dim,) for k in ("attention", "ffw")}
        for n in range(self.n_layers):
            yield from ((f"blk.{n}.{stem}.weight", size) for stem, size in layer.items())
        yield "output_norm.weight", (self.dim,)
        if not self.is_tied:
            yield "output.weight", (self.vocab_size, self.dim)


# vocab_size, context, rope_base, norm_eps
_LLAMA3 = (128256, 131072, 5e5, 1e-5)
_SMOLLM2 = (49152, 8192, 1e5, 1e-5)
_GEMMA3 = (262144, 32768, 1e6, 1e-6)
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (  # dim, ffn_dim, n_layers, heads, kv_heads, head_dim
        Shape("llama-1b", "llama", 2048, 8192, 16, 32, 8, 64, *_LLAMA3),
        Shape("llama-3b", "llama", 3072, 8192, 28, 24, 8, 128, *_LLAMA3),
        Shape("llama-8b", "llama", 4096, 14336, 32, 32, 8, 128, *_LLAMA3, is_tied=False),
        Shape("smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, *_SMOLLM2),
        Shape("gemma3-270m", "gemma3", 640, 2048, 18, 4, 1, 256, *_GEMMA3, window=512),
    )
}


@dataclass(frozen=True)
class Mixture:
    """The formats of a file: most matrices, the output projection, and the sensitive ones."""

    body: str
    head: str
    sensitive: str
    file_type: int  # general.file_type

    def format_of(self, name: str, size: tuple[int, ...], shape: Shape) -> str:
        """Rows that the wanted format's blocks do not divide take the next one that fits."""
        if len(size) == 1:
            return "F32"
        wanted = self.body
        if name == ("token_embd.weight" if shape.is_tied else "output.weight"):
            wanted = self.head
        elif name.endswith((".attn_v.weight", ".ffn_down.weight")):
            wanted = (
                self.sensitive if takes_more(int(name.split(".")[1]), shape.n_layers) else wanted
            )
        while size[-1] % FORMATS[wanted].block:
            wanted = _FALLBACKS.get(wanted, "F16")
        return wanted


def takes_more(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    first = n_layers // 8
    return layer < first or layer >= 7 * n_layers // 8 or (layer - first) % 3 == 2


_FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10},
    **{"Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32},
}


def _plain(name: str) -> Mixture:
    is_kept = FORMATS[name].block == 1 or name == "Q8_0"
    return Mixture(name, name if is_kept else "Q6_K", name, _FILE_TYPES[name])


MIXTURES: dict[str, Mixture] = {
    **{name: _plain(name) for name in FORMATS},
    "Q4_K_M": Mixture("Q4_K", "Q6_K", "Q6_K", 15),
    "Q5_K_M": Mixture("Q5_K", "Q6_K", "Q6_K", 17),
}


class UnknownShape(MartletError):
    """No such shape or mixture in the tables."""


def find_shape(name: str) -> Shape:
    if name not in SHAPES:
        raise UnknownShape(f"no shape is called {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]


def find_mixture(name: str) -> Mixture:
    if name not in MIXTURES:
        raise UnknownShape(f"no type is called {name!r}; there are: {', '.join(MIXTURES)}")
    return MIXTURES[name]
