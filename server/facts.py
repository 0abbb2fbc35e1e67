"""What a model's file says of itself, for clients that list models.

Owns: ModelFacts and how they are read. Must not know: how any dialect shows them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field

from ..runtime.config import Ability
from ..runtime.model import Model


@dataclass(frozen=True)
class ModelFacts:
    arch: str = "unknown"
    n_params: int = 0
    quantization: str = "unknown"
    """The format that most weights have."""
    n_bytes: int = 0
    context_train: int = 0
    dim: int = 0
    abilities: frozenset[Ability] = frozenset({"generate", "embed", "rank"})
    digest: str = "0" * 64
    """Of names, shapes, formats and size: the weights themselves are not read."""
    modified: float = field(default_factory=time.time)
    """Seconds since 1970."""


def facts_of(model: Model) -> ModelFacts:
    tensors = model.file.tensors.values()
    weights_by_format: Counter[str] = Counter()
    digest = hashlib.sha256(str(model.file.n_bytes).encode())
    for tensor in tensors:
        weights_by_format[tensor.format.name] += tensor.n_weights
        digest.update(repr((tensor.name, tensor.format.name, tensor.shape)).encode())
    return ModelFacts(
        arch=model.config.arch,
        n_params=weights_by_format.total(),
        quantization=weights_by_format.most_common(1)[0][0] if weights_by_format else "unknown",
        n_bytes=model.file.n_bytes,
        context_train=model.config.context_train,
        dim=model.config.dim,
        abilities=model.config.abilities,
        digest=digest.hexdigest(),
        modified=model.file.path.stat().st_mtime,
    )
