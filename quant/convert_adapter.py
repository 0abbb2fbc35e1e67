"""A low-rank adapter as PEFT saves it to a GGUF file: factors under the names of adapted weights.

Owns: the names and settings of adapter_config.json, and in which order rows and columns of factors
stand. Must not know: weights of the base model, of which only config.json is read. Keys are those
of the package `peft`.

W becomes W + s B A. Where rows of W change their order on the way into a file, rows of B do; where
columns do, those of A. Weights that the checkpoint holds in one share A, and have rows of B each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .convert import packed_weight
from .convert_config import Settings, read_settings
from .convert_expected import expected
from .convert_recurrent import Change
from .convert_rope import positive
from .convert_tensors import Weight, canonical, shares_of, tensor_names, weight_of
from .errors import FileFormatError, UnsupportedError
from .formats import FORMATS
from .gguf_field import Field
from .gguf_write import OutTensor, write_gguf
from .safetensors_file import SafetensorsFile, SourceTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
# Settings that make it another sum than W + s B A, and what they are where they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
}
# Kinds of initial values for which the base model was changed, too.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_PATTERN_LETTERS = frozenset("*+?()[]{}|^$\\")


@dataclass(frozen=True, eq=False)
class AdapterConversion:
    """An adapter that can be written: read and checked, except for values."""

    settings: Settings  # of the base model
    alpha: float
    weights: list[Weight]  # factors

    @property
    def stored_type(self) -> str:
        types = {w.source.dtype for w in self.weights if w.source}
        return types.pop() if len(types) == 1 else "F32"

    def metadata(self, name: str) -> dict[str, Any]:
        return {
            "general.architecture": self.settings.family.arch,
            "general.type": "adapter",
            "general.name": name,
            "adapter.type": "lora",
            "adapter.lora.alpha": self.alpha,
        }


def read_adapter(folder: str | PathLike[str], base: str | PathLike[str]) -> AdapterConversion:
    """base: the folder of the model that was adapted; of it, config.json is enough. Raises
    FileFormatError or UnsupportedError where the adapter cannot be converted."""
    here, there = (Checkpoint(Path(path), {}, ()) for path in (folder, base))
    config, base_config = here.json(CONFIG), there.json("config.json")
    if not config:
        raise FileFormatError(f"{folder}: has no {CONFIG}; it is no adapter as PEFT saves it")
    if not base_config:
        raise FileFormatError(f"{base}: has no config.json; name the folder of the base model")
    _refuse(config)
    settings = read_settings(base_config)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise FileFormatError(f"{CONFIG}: r is {rank!r}, expected a whole number from 1")
    alpha = positive("lora_alpha of the adapter", config.get("lora_alpha"))
    tensors = SafetensorsFile.open(Path(folder) / WEIGHTS).tensors
    scaled = _Scales(rank, alpha, bool(config.get("use_rslora")), config)
    weights = _factors(settings, tensors, scaled)
    return AdapterConversion(settings, scaled.in_file(rank), weights)


def write_adapter(
    conversion: AdapterConversion, path: str | PathLike[str], *, format_name: str, name: str
) -> int:
    """Writes the file and returns its bytes."""
    fields = {key: Field.of(value) for key, value in conversion.metadata(name).items()}
    tensors = [
        OutTensor(w.name, w.shape, FORMATS[format_name], partial(packed_weight, w, format_name))
        for w in conversion.weights
    ]
    return write_gguf(path, fields, tensors)


@dataclass(frozen=True)
class _Scales:
    """s of every module. A reader of the file takes alpha / rank, of one alpha for all."""

    rank: int
    alpha: float
    by_root: bool  # rank-stabilised: s = alpha / sqrt(rank)
    config: Mapping[str, Any]

    def in_file(self, rank: int) -> float:
        return self.alpha * (rank**0.5 if self.by_root else 1.0)

    def of(self, module: str, rank: int) -> float:
        """What B of this module is multiplied by, for a reader to get its s."""
        alpha = positive(
            "alpha_pattern of the adapter", self._own(module, "alpha_pattern", self.alpha)
        )
        if rank != self._own(module, "rank_pattern", self.rank):
            raise FileFormatError(
                f"{WEIGHTS}: the factors of {module!r} have rank {rank}, {CONFIG} says another"
            )
        wanted = alpha / (rank**0.5 if self.by_root else rank)
        return wanted / (self.in_file(self.rank) / rank)

    def _own(self, module: str, key: str, default: Any) -> Any:
        pattern = self.config.get(key) or {}
        if not isinstance(pattern, dict):
            raise FileFormatError(f"{CONFIG}: {key} is {pattern!r:.80}, no table")
        for name, value in pattern.items():
            if _PATTERN_LETTERS & set(name):
                raise UnsupportedError(
                    f"{CONFIG}: {key} has the pattern {name!r:.80}; only names are supported"
                )
            if module == name or module.endswith(f".{name}"):
                return value
        return default


def _refuse(config: Mapping[str, Any]) -> None:
    for key, neutral in _NEUTRAL.items():
        if (value := config.get(key, neutral[0])) not in neutral:
            raise UnsupportedError(f"{CONFIG}: {key} is {value!r:.80}, which is not supported")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{CONFIG}: init_lora_weights is {initial!r:.80}, for which the base model was "
            "changed, too; let PEFT save the adapter for the original one"
        )


def _factors(
    settings: Settings, tensors: Mapping[str, SourceTensor], scales: _Scales
) -> list[Weight]:
    wanted, names = expected(settings, settings.vocab_size or 0), tensor_names(settings)
    pairs = _pairs(tensors)
    found: list[Weight] = []
    for module, (a, b) in pairs.items():
        name = canonical(f"{module}.weight", settings.family)
        shares, in_turn = shares_of(settings, name)
        shapes = {share: wanted.get(share) for share in shares or [name]}
        heights = [shape[0] for shape in shapes.values() if shape and len(shape) == 2]
        if len(heights) < len(shapes) or (in_turn and shares):
            raise UnsupportedError(
                f"{WEIGHTS}: {module!r} is no projection of a {settings.family.arch} model that "
                "can be adapted"
            )
        cols = next(iter(shapes.values()))
        assert cols
        (rank, a_cols), (b_rows, b_cols) = a.matrix_shape, b.matrix_shape
        if b_cols != rank or a_cols != cols[1] or b_rows != sum(heights):
            raise FileFormatError(
                f"{WEIGHTS}: factors {b.matrix_shape} and {a.matrix_shape} of {module!r} do not "
                f"make its {(sum(heights), cols[1])}"
            )
        scale, first = scales.of(module, rank), 0
        for share, height in zip(shapes, heights, strict=True):
            whole = weight_of(settings, share, names, b, first, (height, rank))
            change = replace(whole.change, cols=None, scale=whole.change.scale * scale)
            found.append(
                Weight(
                    f"{whole.name}.lora_a", (rank, a_cols), a, change=Change(cols=whole.change.cols)
                )
            )
            found.append(replace(whole, name=f"{whole.name}.lora_b", change=change))
            first += height
    return found


def _pairs(tensors: Mapping[str, SourceTensor]) -> dict[str, tuple[SourceTensor, SourceTensor]]:
    """Both factors by the name of their module."""
    pairs: dict[str, tuple[SourceTensor, SourceTensor]] = {}
    for name, tensor in tensors.items():
        tensor.check_convertible()
        if not name.endswith((_A, _B)) or len(tensor.shape) != 2:
            raise UnsupportedError(f"{WEIGHTS}: tensor {name!r} is no factor of a projection")
        stem, is_a = name[: -len(_A)], name.endswith(_A)
        other = tensors.get(stem + (_B if is_a else _A))
        if other is None:
            raise FileFormatError(f"{WEIGHTS}: {name!r} stands alone; fetch it again")
        if is_a:
            pairs[stem.removeprefix(_PREFIX)] = tensor, other
    if not pairs:
        raise FileFormatError(f"{WEIGHTS}: has no tensors; fetch it again")
    return pairs
