"""The table of docs/architectures.md: what is known of every architecture, said by the code itself.

Owns: the wording, and published sizes of well-known models. Must not know: files. Run it after an
architecture was added: `python -m martlet.scripts.architecture_table docs/architectures.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from martlet.quant.convert_families import FAMILIES, family_of
from martlet.runtime.architectures import ARCHITECTURES, Architecture
from martlet.runtime.models import RECORDERS, dense, encoders
from martlet.runtime.models.blocks import HeadNorm
from martlet.runtime.ops import Activation, RopeStyle

_RECIPES = Path(__file__).resolve().parents[1] / "tests" / "data" / "recipes"
_BEGIN, _END = "<!-- table -->\n", "<!-- end -->\n"
_F16_BYTES = 2

# Published configurations: layers with keys of their own, kv heads, head size.
SIZES: dict[str, tuple[str, int, int, int]] = {
    "bailingmoe2": ("Ling-mini-2.0", 20, 4, 128),
    "cohere2": ("Command R7B", 32, 8, 128),
    "deepseek2": ("DeepSeek-V2-Lite", 27, 1, 576),
    "ernie4_5": ("ERNIE 4.5 0.3B", 18, 2, 128),
    "ernie4_5-moe": ("ERNIE 4.5 21B-A3B", 28, 4, 128),
    "exaone4": ("EXAONE 4.0 1.2B", 30, 8, 64),
    "falcon-h1": ("Falcon-H1 0.5B", 36, 2, 64),
    "gemma": ("Gemma 2B", 18, 1, 256),
    "gemma2": ("Gemma 2 2B", 26, 4, 256),
    "gemma3": ("Gemma 3 270M", 18, 1, 256),
    "glm4": ("GLM-4 9B 0414", 40, 2, 128),
    "glm4moe": ("GLM-4.5-Air", 46, 8, 128),
    "gpt-oss": ("gpt-oss-20b", 24, 8, 64),
    "granite": ("Granite 3.3 2B", 40, 8, 64),
    "granitehybrid": ("Granite 4.0 H-Micro 3B", 4, 8, 64),
    "granitemoe": ("Granite 3.1 3B-A800M", 32, 8, 64),
    "hunyuan-dense": ("Hunyuan 1.8B", 32, 4, 128),
    "llama": ("Llama 3.2 1B", 16, 8, 64),
    "lfm2": ("LFM2 1.2B", 6, 8, 64),
    "lfm2moe": ("LFM2 8B-A1B", 6, 8, 64),
    "mistral3": ("Ministral 3 3B", 26, 8, 128),
    "nemotron_h": ("Nemotron-H 8B", 4, 8, 128),
    "nemotron_h_moe": ("Nemotron 3 Nano 30B-A3B", 6, 2, 128),
    "olmo2": ("OLMo 2 1B", 16, 16, 128),
    "phi3": ("Phi-4-mini", 32, 8, 128),
    "qwen2": ("Qwen2.5 0.5B", 24, 2, 64),
    "qwen2moe": ("Qwen1.5-MoE A2.7B", 24, 16, 128),
    "qwen2vl": ("Qwen2-VL 2B", 28, 2, 128),
    "qwen3": ("Qwen3 0.6B", 28, 8, 128),
    "qwen35": ("Qwen3.5 4B", 8, 4, 256),
    "qwen35moe": ("Qwen3.5-35B-A3B", 10, 2, 256),
    "qwen3moe": ("Qwen3-30B-A3B", 48, 4, 128),
    "qwen3next": ("Qwen3-Next-80B-A3B", 12, 2, 256),
    "qwen3vl": ("Qwen3-VL 2B", 28, 8, 128),
    "qwen3vlmoe": ("Qwen3-VL-30B-A3B", 48, 4, 128),
    "smollm3": ("SmolLM3 3B", 36, 4, 128),
}
# Tested without a checkpoint of their own, as transformers has no such class or none that is small.
OTHERWISE = {
    "bailingmoe2": "glm4moe, renamed",
    "nomic-bert-moe": "its formula in NumPy",
    "qwen3vlmoe": "qwen3moe, renamed",
}
_ORDERS: dict[Callable[..., None], str] = {
    dense.pre_norm: "norms before",
    dense.post_norm: "norms behind",
    dense.sandwich: "norms before and behind",
    dense.parallel: "attention beside MLP",
    encoders.post_norm: "norms behind, learned segments",
}
_HEAD_NORMS = {
    HeadNorm.HEADS: "head norms",
    HeadNorm.WHOLE: "norms of whole q and k",
    HeadNorm.AFTER_ROPE: "head norms after rope",
    HeadNorm.WHERE_PRESENT: "head norms where present",
}
_GLUS = {
    Activation.GELU_TANH: "GeGLU",
    Activation.GELU_ERF: "GELU without gate",
    Activation.CLAMPED: "clamped SwiGLU",
}
_SCALES = {
    "attention.temperature_scale": "query temperature",
    "residual_scale": "scaled residuals",
    "logit_scale": "scaled logits",
}


def table() -> str:
    """Markdown, one row per architecture."""
    rows = [
        "| architecture | attention | layers | KV bytes per token (f16) | tested by |",
        "|---|---|---|--:|---|",
    ]
    for name in sorted(ARCHITECTURES):
        cells = (_attention(ARCHITECTURES[name]), _layers(name), _kv_bytes(name), _tests(name))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _attention(arch: Architecture) -> str:
    parts = ["MLA" if arch.is_latent else "GQA" if arch.is_causal else "both ways"]
    if arch.local_every:
        parts.append(f"windows in {arch.local_every - 1} of {arch.local_every} layers")
    if arch.has_sinks:
        parts.append("sinks")
    if arch.rope_on_local_only:
        parts.append("rope there alone")
    if arch.no_rope_every == 1:
        parts.append("no rope")
    elif arch.no_rope_every:
        parts.append(f"no rope in 1 of {arch.no_rope_every}")
    if arch.local_rope_base:
        parts.append("two rope bases")
    if arch.recurrence:
        every = f" in {arch.attention_every - 1} of {arch.attention_every} layers"
        where = " in all layers" if arch.has_both else " in others"
        parts.append(arch.recurrence + (every if arch.attention_every else where))
    return ", ".join(parts)


def _layers(name: str) -> str:
    recorder, arch = RECORDERS[name], ARCHITECTURES[name]
    if not isinstance(recorder, partial) or recorder.func not in _ORDERS:
        said = (recorder.__doc__ or "").split("\n", 1)[0].rstrip(".")
        return f"{said}, experts" if arch.experts else said
    options = recorder.keywords
    parts = [
        _ORDERS[recorder.func],
        "LayerNorm" if arch.is_centered else "",
        _GLUS.get(options.get("activation", Activation.SILU), "SwiGLU"),
        _positions(arch, options.get("style", RopeStyle.HALF)),
        _HEAD_NORMS.get(options.get("head_norm", HeadNorm.NONE), ""),
        "scaled embedding" if arch.scales_embedding else "",
        "experts" if arch.experts else "",
        "soft caps" if arch.attention_cap or arch.logit_cap else "",
        *(said for key, said in _SCALES.items() if key in arch.supports),
    ]
    return ", ".join(part for part in parts if part)


def _positions(arch: Architecture, style: RopeStyle) -> str:
    if arch.no_rope_every == 1:
        return "learned positions"
    return "rope of pairs" if style is RopeStyle.PAIR else "rope of halves"


def _kv_bytes(name: str) -> str:
    if not ARCHITECTURES[name].is_causal:
        return "none is kept"
    if name not in SIZES:
        return ""
    model, n_layers, kv_heads, head_dim = SIZES[name]
    n_kept = 1 if ARCHITECTURES[name].is_latent else 2  # keys that hold the values, or both
    return f"{model}: {n_layers * n_kept * kv_heads * head_dim * _F16_BYTES:,}"


def _tests(name: str) -> str:
    """Recorded checkpoints that are this architecture, with logits of transformers."""
    found = []
    for path in sorted(_RECIPES.glob("*.json")):
        recipe = json.loads(path.read_text())
        if recipe["model"] not in FAMILIES:
            continue
        if family_of(recipe["model"], recipe["config"]).arch == name:
            found.append(path.stem)
    return ", ".join(found) or OTHERWISE[name]


def written_into(page: str) -> str:
    """The page with the table made anew."""
    return put_between(page, table())


def put_between(page: str, text: str) -> str:
    """The page with this between its two marks."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}\n{text}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written_into(path.read_text()))
