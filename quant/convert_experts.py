"""Experts of a checkpoint: what its config says of them, and their tensors as stacks.

Owns: the names that model classes give to experts, their metadata in a GGUF file, and tensors of
all experts read as one. Must not know: other parts of a layer, files. Keys of configs are those of
Hugging Face's `transformers` 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .convert_rope import positive
from .convert_turns import TurnPart
from .errors import FileFormatError, UnsupportedError
from .safetensors_file import SourceTensor

_NUMBERED = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+\.weight)")
# Stacks (experts, rows, cols) that some checkpoints store, and which parts lie in one of them.
_STORED_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_STORED_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_MOST = 1024  # experts of a layer

# How DeepSeek's way of choosing experts is said: in config.json, and in a GGUF file.
GROUPED_CHOICE: Mapping[str, str] = {
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


@dataclass(frozen=True)
class ExpertKeys:
    """How a family of model classes names experts, in config.json and in the checkpoint."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first that is there
    used: str = "num_experts_per_tok"
    dim: str = ""  # the width of an expert; "": that of a dense layer
    shared_dim: str = ""  # the width of the shared expert, or …
    shared_count: str = ""  # … how many there are, each as wide as the others
    tells_shared_dim: bool = False  # their width in all, too
    first: str = ""  # layers before are dense
    layer_kinds: str = ""  # where it is there, it names each layer dense or sparse instead
    every: str = ""  # of the others, each so manieth has experts
    normalizes: bool | None = None  # what readers take for granted; None: they read a key
    # keys of config.json -> keys of the GGUF file
    numbers: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of the GGUF file
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # all that is supported
    module: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # "": there is no gate
    shared: str = "shared_experts"
    has_shared_gate: bool = False
    choice_bias: str = ""
    has_bias: bool = False  # so have the router and all projections
    takes_turns: bool = False  # stacks are stored as convert_turns.py describes


@dataclass(frozen=True)
class SourceExperts:
    """Of a checked config."""

    keys: ExpertKeys
    count: int
    dim: int
    shared_dim: int
    first: int
    every: int
    metadata: Mapping[str, Any]

    def has(self, layer: int) -> bool:
        return layer >= self.first and (layer + 1) % self.every == 0

    def parts(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Names within a layer, and shapes; those of experts as one stack."""
        k, gate, up, down = self.keys, *self.keys.parts
        found: dict[str, tuple[int, ...]] = {f"{k.module}.gate.weight": (self.count, dim)}
        if k.has_bias:
            found[f"{k.module}.gate.bias"] = (self.count,)
        if k.choice_bias:
            found[f"{k.module}.{k.choice_bias}"] = (self.count,)
        for part, shape in (
            (gate, (self.dim, dim)),
            (up, (self.dim, dim)),
            (down, (dim, self.dim)),
        ):
            if not part:
                continue
            found[f"{k.module}.experts.{part}.weight"] = (self.count, *shape)
            if k.has_bias:
                found[f"{k.module}.experts.{part}.bias"] = (self.count, shape[0])
        if self.shared_dim:
            wide = (self.shared_dim, dim)
            for part, shape in ((gate, wide), (up, wide), (down, wide[::-1])):
                if not part:
                    continue
                found[f"{k.module}.{k.shared}.{part}.weight"] = shape
        if k.has_shared_gate:
            found[f"{k.module}.shared_expert_gate.weight"] = (dim,)
        return found


def read_experts(
    config: Mapping[str, Any], keys: ExpertKeys, ffn_dim: int, n_layers: int
) -> SourceExperts:
    """Refuses what cannot be converted, naming key and value."""

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise FileFormatError(f"config.json: {key} is {value!r}, expected a whole number")
        return value

    for key, supported in keys.neutral.items():
        if config.get(key, supported[0]) not in supported:
            raise UnsupportedError(f"config.json: {key} is {config[key]!r}, which is not supported")
    named = next((key for key in keys.count if key in config), keys.count[0])
    n_experts, used = count(named), count(keys.used)
    if not 1 <= used <= n_experts <= _MOST:
        raise FileFormatError(
            f"config.json: {keys.used} is {used} of {n_experts} experts, expected 1 to {named} and "
            f"no more than {_MOST}"
        )
    dim = count(keys.dim) if keys.dim else ffn_dim
    metadata: dict[str, Any] = {"expert_count": n_experts, "expert_used_count": used}
    if keys.dim:
        metadata["expert_feed_forward_length"] = dim
    shared_dim = 0
    if keys.shared_dim:
        shared_dim = metadata["expert_shared_feed_forward_length"] = count(keys.shared_dim)
    if keys.shared_count:
        metadata["expert_shared_count"] = count(keys.shared_count)
        shared_dim = dim * metadata["expert_shared_count"]
        if keys.tells_shared_dim:
            metadata["expert_shared_feed_forward_length"] = shared_dim
    first, every = 0, 1
    if keys.first:
        kinds = config.get(keys.layer_kinds) if keys.layer_kinds else None
        first = count(keys.first) if kinds is None else _n_dense(keys.layer_kinds, kinds, n_layers)
        metadata["leading_dense_block_count"] = first
    if keys.every:
        every = metadata["interleave_moe_layer_step"] = count(keys.every) or 1
    last = config.get("moe_layer_end_index", -1)
    if last not in (-1, n_layers - 1):
        raise UnsupportedError(
            f"config.json: moe_layer_end_index is {last}, only {n_layers - 1} is supported"
        )
    _check_norm(config, keys, metadata)
    for key, new in keys.numbers.items():
        if config.get(key) is not None:
            is_scale = new.endswith("_scale")
            metadata[new] = positive(key, config[key]) if is_scale else count(key)
    return SourceExperts(keys, n_experts, dim, shared_dim, first, every, {**metadata, **keys.fixed})


def _n_dense(key: str, kinds: Any, n_layers: int) -> int:
    """Of layers in front; behind them all have experts."""
    n = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * n + ["sparse"] * (n_layers - n):
        raise UnsupportedError(
            f"config.json: {key} is {kinds!r:.80}, only dense layers before {n_layers} in all are "
            "supported"
        )
    return n


def _check_norm(config: Mapping[str, Any], keys: ExpertKeys, metadata: dict[str, Any]) -> None:
    norm = config.get("norm_topk_prob", keys.normalizes)
    if keys.normalizes is None:
        metadata["expert_weights_norm"] = bool(norm)
    elif bool(norm) != keys.normalizes:
        raise UnsupportedError(
            f"config.json: norm_topk_prob is {norm!r}, only {keys.normalizes} is supported, as no "
            "other reader of the file would know"
        )


@dataclass(frozen=True, eq=False)
class StackedTensor:
    """Tensors of all experts, one behind the other, with what a SourceTensor offers."""

    name: str
    parts: tuple[SourceTensor, ...]

    @property
    def dtype(self) -> str:
        types = {part.dtype for part in self.parts}
        return types.pop() if len(types) == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n_rows(self) -> int:
        return len(self.parts) * self.parts[0].n_rows

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """Rows as a new float32 array (n, cols); the rows of an expert follow those of the last."""
        assert isinstance(index, slice)
        height, found = self.parts[0].n_rows, []
        start, stop = index.start, index.stop
        for e in range(start // height, -(-stop // height)):
            first, end = max(start - e * height, 0), min(stop - e * height, height)
            found.append(self.parts[e].rows(slice(first, end)))
        return np.concatenate(found)


@dataclass(frozen=True, eq=False)
class StackPart:
    """Some rows of every expert of a stored stack, with what a SourceTensor offers."""

    name: str
    source: SourceTensor
    first: int  # row of an expert
    height: int

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0], self.height, self.source.shape[-1])

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def n_rows(self) -> int:
        return self.shape[0] * self.height

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """As of StackedTensor."""
        assert isinstance(index, slice)
        expert, row = np.divmod(np.arange(index.start, index.stop), self.height)
        return self.source.rows(expert * self.source.shape[1] + self.first + row)


Source = SourceTensor | StackedTensor | StackPart | TurnPart


def stacked(named: Mapping[str, SourceTensor]) -> dict[str, Source]:
    """The tensors with those of all experts as one: numbered ones are put together, in the place
    of the first, and stored stacks are taken apart."""
    found: dict[str, Source] = {}
    experts: dict[str, dict[int, SourceTensor]] = {}
    for name, tensor in named.items():
        if (match := _STORED_STACK.fullmatch(name)) and len(tensor.shape) == 3:
            names = _STORED_PARTS[match[2]]
            height, rest = divmod(tensor.shape[1], len(names))
            if rest:
                raise FileFormatError(
                    f"tensor {name!r} has {tensor.shape[1]} rows of every expert, expected gate's "
                    "and as many of up"
                )
            for i, part in enumerate(names):
                stack = f"{match[1]}.{part}.weight"
                found[stack] = StackPart(stack, tensor, i * height, height)
            continue
        match = _NUMBERED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        stack = f"{match[1]}.{match[3]}"
        found.setdefault(stack, tensor)
        experts.setdefault(stack, {})[int(match[2])] = tensor
    for name, numbered in experts.items():
        parts = [numbered[e] for e in range(len(numbered)) if e in numbered]
        if len(parts) < len(numbered) or len({part.shape for part in parts}) != 1:
            raise FileFormatError(
                f"tensors of experts {name!r}: the numbers or shapes of {len(numbered)} of them do "
                "not fit together"
            )
        found[name] = StackedTensor(name, tuple(parts))
    return found
