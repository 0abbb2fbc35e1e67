"""Which tensors a checkpoint must have, and their shapes, in the order of the file.

Owns: the parts of a layer. Must not know: what a checkpoint has, except which parts of the blocks
behind its layers; how tensors are stored, or what a GGUF file calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .convert_config import Settings
from .convert_family import GATE_UP, QKV, SHARED_GATE_UP, Family, HeadNorm
from .convert_nextn import block_parts
from .convert_recurrent import PLAIN

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

# A layer's parts besides norms: names under model.layers.N, and their (rows, cols).
_ATTENTION: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("q_proj", "dim"),
    "self_attn.k_proj": ("kv", "dim"),
    "self_attn.v_proj": ("kv", "dim"),
    "self_attn.o_proj": ("dim", "q"),
}
_MLP = {
    "mlp.gate_proj": ("ffn", "dim"),
    "mlp.up_proj": ("ffn", "dim"),
    "mlp.down_proj": ("dim", "ffn"),
}
_UNGATED_MLP = {part: dims for part, dims in _MLP.items() if part != "mlp.gate_proj"}
_KEPT_FUSED = {QKV: ("qkv", "dim"), GATE_UP: ("gate_up", "dim")}
# Parts that some checkpoints store stacked in one tensor, in this order.
FUSED = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    SHARED_GATE_UP: ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}


def expected(
    settings: Settings, embedding_rows: int, named: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Shapes by canonical name, in the order of the file. named: what the checkpoint has, of which
    some parts of blocks behind the layers may be missing."""
    sizes = _sizes(settings, embedding_rows)
    wanted: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (sizes["vocab"], sizes["dim"])}
    for name, rows in settings.table_rows.items():
        wanted[f"{name}.weight"] = (rows, sizes["dim"])
    wanted |= settings.layered.tables() if settings.layered else {}
    if settings.family.embedding_norm:
        wanted |= _with_bias(settings, settings.family.embedding_norm, (sizes["dim"],))
    for n in range(settings.n_blocks):
        layer = _layer(settings, n, sizes)
        wanted |= {f"model.layers.{n}.{part}": shape for part, shape in layer.items()}
        if n >= settings.n_layers:
            wanted |= block_parts(named, n, sizes["dim"], sizes["vocab"])
    if settings.family.final_norm:
        wanted[f"{settings.family.final_norm}.weight"] = (sizes["dim"],)
    wanted |= _classifier(settings)
    if not settings.is_tied:
        wanted[f"{HEAD}.weight"] = (sizes["vocab"], sizes["dim"])
    return wanted


def _attention_parts(settings: Settings) -> dict[str, tuple[str, ...]]:
    family, head_norm = settings.family, settings.head_norm
    if settings.latent:
        return settings.latent.parts()
    parts = _with_fused(_ATTENTION, QKV, family)
    if head_norm is not HeadNorm.NONE:
        widths = ("q", "kv") if head_norm is HeadNorm.WHOLE else ("head", "head")
        parts |= {name: (w,) for name, w in zip(family.head_norm_names, widths, strict=True)}
    if family.has_sinks:
        parts["self_attn.sinks"] = ("heads",)
    return parts


def _with_fused(
    parts: Mapping[str, tuple[str, ...]], fused: str, family: Family
) -> dict[str, tuple[str, ...]]:
    if fused not in family.keeps_fused:
        return dict(parts)
    rest = {name: dims for name, dims in parts.items() if name not in FUSED[fused]}
    return {fused: _KEPT_FUSED[fused], **rest}


def _with_bias(settings: Settings, part: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    weight = {f"{part}.weight": shape}
    return {**weight, f"{part}.bias": shape[:1]} if part in settings.biased else weight


def _classifier(settings: Settings) -> dict[str, tuple[int, ...]]:
    if not settings.n_labels:
        return {}
    dim, labels, name = settings.dim, settings.n_labels, settings.family.classifier
    pooler = {"pooler.dense.weight": (dim, dim), "pooler.dense.bias": (dim,)}
    return {**pooler, f"{name}.weight": (labels, dim), f"{name}.bias": (labels,)}


def _layer(settings: Settings, n: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes by name within layer n: what mixes tokens, then what each passes through alone."""
    if settings.layered:
        return settings.layered.layer(n)
    family = settings.family
    norms, recurrence, experts = family.norms, settings.recurrence, settings.experts
    layer = recurrence.layers[n] if recurrence and n < settings.n_layers else PLAIN
    wanted: dict[str, tuple[int, ...]] = {}

    def add(parts: Mapping[str, tuple[str, ...]]) -> None:
        for part, dims in parts.items():
            wanted.update(_with_bias(settings, part, tuple(sizes[dim] for dim in dims)))

    def add_norms(*names: str) -> None:
        add({name: ("dim",) for name in names if name})

    if n or not family.skips_first_norm:
        add_norms(norms.before_attention)
    if recurrence and layer.is_recurrent:
        wanted.update(recurrence.parts)
    if layer.has_attention:
        add(_attention_parts(settings))
    add_norms(norms.after_attention, norms.before_mlp)
    if layer.has_mlp and experts and experts.has(n):
        wanted.update(experts.parts(settings.dim))
    elif layer.has_mlp:
        add(_with_fused(_MLP, GATE_UP, family) if family.has_gate else _UNGATED_MLP)
    add_norms(norms.after_mlp)
    return wanted


def _sizes(settings: Settings, embedding_rows: int) -> dict[str, int]:
    q, kv = settings.heads * settings.head_dim, settings.kv_heads * settings.head_dim
    return {
        "dim": settings.dim,
        "q": q,
        "q_proj": q * (settings.recurrence.q_rows if settings.recurrence else 1),
        "kv": kv,
        "qkv": q + 2 * kv,
        "head": settings.head_dim,
        "heads": settings.heads,
        "ffn": settings.ffn_dim,
        "gate_up": 2 * settings.ffn_dim,
        "vocab": settings.vocab_size or embedding_rows,
        **(settings.latent.sizes() if settings.latent else {}),
    }
