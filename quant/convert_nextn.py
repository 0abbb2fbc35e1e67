"""Blocks behind a checkpoint's last layer that predict further tokens (MTP, `nextn` in GGUF files).

Owns: how model classes name them, and their parts besides those of any layer. Must not know:
config.json, the parts of layers, files.

DeepSeek and GLM count them on as layers; Qwen has them under `mtp.`, or `model.mtp.`, with its own
names of parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from .errors import UnsupportedError

T = TypeVar("T")

_COUNTED = re.compile(r"(?:.*\.)?layers\.(\d+)\.eh_proj\.weight")
_QWEN = re.compile(r"(?:model\.)?mtp\.")
_QWEN_LAYER = re.compile(rf"{_QWEN.pattern}layers\.(\d+)\.")
_QWEN_PARTS = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Names of parts in a block, and in a GGUF file under blk.N.nextn; the first three must be there.
_PARTS = {
    "eh_proj.weight": "eh_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "shared_head.head.weight": "shared_head_head.weight",
    "shared_head.norm.weight": "shared_head_norm.weight",
}
_NEEDED = 3


def count_blocks(names: Iterable[str], n_layers: int) -> int:
    """How many blocks the tensors of these names have behind n_layers layers."""
    names = list(names)
    counted = {int(match[1]) for name in names if (match := _COUNTED.fullmatch(name))}
    qwen = {int(match[1]) for name in names if (match := _QWEN_LAYER.match(name))}
    if len(qwen) > 1:
        raise UnsupportedError(
            f"{len(qwen)} blocks under 'mtp.layers' share one 'mtp.fc', which is not supported; "
            "leave them out with --no-nextn"
        )
    return len({n for n in counted if n >= n_layers}) + len(qwen)


def placed(named: Mapping[str, T], n_layers: int) -> dict[str, T]:
    """The tensors with all blocks named as layers behind the last."""
    found: dict[str, T] = {}
    for name, tensor in named.items():
        if match := _QWEN_LAYER.match(name):
            name = f"model.layers.{n_layers + int(match[1])}.{name[match.end() :]}"
        elif match := _QWEN.match(name):
            rest = name[match.end() :]
            for old, new in _QWEN_PARTS.items():
                if rest.startswith(old):
                    name = f"model.layers.{n_layers}.{new}{rest.removeprefix(old)}"
        found[name] = tensor
    return found


def first_layers(named: Mapping[str, T], n_layers: int) -> dict[str, T]:
    """The tensors without those of layers from n_layers on."""
    layers = {name: _LAYER.match(name) for name in named}
    behind = {name for name, match in layers.items() if match and int(match[1]) >= n_layers}
    return {name: tensor for name, tensor in named.items() if name not in behind}


def block_parts(named: Collection[str], n: int, dim: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name of what block n has besides a layer; what it shares with the model may be
    missing."""
    table = (vocab, dim)
    shapes = ((dim, 2 * dim), (dim,), (dim,), table, table, (dim,))
    stem = f"model.layers.{n}."
    return {
        f"{stem}{part}": shape
        for i, (part, shape) in enumerate(zip(_PARTS, shapes, strict=True))
        if i < _NEEDED or f"{stem}{part}" in named
    }


def shared_tables(named: Mapping[str, object]) -> list[tuple[str, bool]]:
    """Embeddings and output matrices of blocks by name, and whether it is an output matrix."""
    ends = ((".embed_tokens.weight", False), (".shared_head.head.weight", True))
    return [
        (name, is_head)
        for name in named
        for end, is_head in ends
        if _LAYER.match(name) and name.endswith(end)
    ]


def own_name(name: str) -> str | None:
    """In a GGUF file; None for what is no such part."""
    match = _LAYER.match(name)
    part = _PARTS.get(name[match.end() :]) if match else None
    return f"blk.{match[1]}.nextn.{part}" if match and part else None
