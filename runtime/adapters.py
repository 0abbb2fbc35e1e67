"""Low-rank adapters (LoRA) in GGUF form: what a file adds to which weights of a model.

Owns: reading such files, the names of their tensors beside the model's, and which request gets how
much of each. Must not know: how the sums are computed, or what an adapter is called by clients.

An adapter of rank r has for a weight (rows, cols) two factors, a (r, cols) and b (rows, r), and
adds share * alpha / r * b @ a to it (Hu et al., 2021, arXiv:2106.09685). Weights themselves stay as
they are: the products of a and b are added row by row, so requests with different adapters share
steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np

from ..quant.gguf_file import GGUFFile, GGUFTensor
from .errors import FileFormatError, RequestError, UnsupportedError
from .plan import FLOAT_FORMATS, Plan
from .plan_recording import LowRankParts
from .weights import stored_name

_FACTORS = (".lora_a", ".lora_b")
_EMBEDDING = "token_embd.weight"  # as a tied output it would be adapted there alone
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class AdapterFile:
    """Where an adapter is, what it is called, and how much of it those get who do not say."""

    path: str | PathLike[str]
    name: str
    share: float = 0.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"{self.name!r} cannot be the name of an adapter: use up to 64 letters, digits, "
                "'.', '_' and '-'",
                field="lora",
            )
        check_share(self.share)

    @classmethod
    def parse(cls, text: str) -> AdapterFile:
        """NAME=PATH: for requests that name it. PATH: for all that do not say otherwise."""
        name, has_name, path = text.partition("=")
        return cls(path, name) if has_name else cls(text, Path(text).stem, 1.0)


@dataclass(frozen=True)
class Adapter:
    """An open adapter. Its tensors are known as NAME/WEIGHT.lora_a and NAME/WEIGHT.lora_b."""

    name: str
    share: float
    alpha: float
    file: GGUFFile = field(repr=False)

    @classmethod
    def open(cls, source: AdapterFile, arch: str) -> Adapter:
        """Raises FileFormatError, UnsupportedError; `arch` is the model's architecture."""
        file = GGUFFile.open(source.path)
        try:
            _check_kind(file, arch)
            _check_tensors(file)
            alpha = file.metadata.get("adapter.lora.alpha", 0.0)
            if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
                raise FileFormatError(f"{file.path}: adapter.lora.alpha is {alpha!r}, not a number")
            if not _is_float32(alpha):
                raise FileFormatError(f"{file.path}: adapter.lora.alpha is {alpha}")
        except BaseException:
            file.close()
            raise
        return cls(source.name, source.share, float(alpha), file)

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        return {f"{self.name}/{name}": tensor for name, tensor in self.file.tensors.items()}

    def parts_of(self, weight: str) -> LowRankParts | None:
        """What is added to a weight; None: nothing."""
        whole = stored_name(weight)
        found = self.file.tensors.get(f"{whole}.lora_a")
        if found is None or whole == _EMBEDDING:
            return None
        rank = found.shape[0]
        scale = self.alpha / rank if self.alpha else 1.0
        a, b = f"{self.name}/{whole}.lora_a", f"{self.name}/{weight}.lora_b"
        return LowRankParts(a, b, rank, scale)

    def check_used(self, plan: Plan) -> None:
        """Raises UnsupportedError where a tensor would have no effect."""
        used = {stored_name(tensor.name) for tensor in plan.tensors}
        left = [name for name in self.file.tensors if f"{self.name}/{name}" not in used]
        if left:
            raise UnsupportedError(
                f"{self.file.path}: {len(left)} tensors belong to no weight that can be adapted, "
                f"among them {left[0]!r}; the model's projections can, its embedding and experts "
                "cannot"
            )


def open_adapters(sources: Iterable[AdapterFile], arch: str) -> list[Adapter]:
    """All of them or none; no two have one name."""
    opened: list[Adapter] = []
    try:
        for source in sources:
            if any(source.name == other.name for other in opened):
                raise RequestError(
                    f"two adapters are called {source.name!r}; give one another name: NAME=PATH",
                    field="lora",
                )
            opened.append(Adapter.open(source, arch))
    except BaseException:
        for adapter in opened:
            adapter.file.close()
        raise
    return opened


def all_tensors(file: GGUFFile, adapters: Iterable[Adapter]) -> dict[str, GGUFTensor]:
    """Those of a model's file, and of its adapters by the names they have beside them."""
    tensors = dict(file.tensors)
    for adapter in adapters:
        tensors |= adapter.tensors
    return tensors


def check_share(share: float) -> None:
    if not _is_float32(share):
        raise RequestError(
            f"the share of an adapter is {share}, expected a number that float32 holds",
            field="lora",
        )


def _is_float32(value: float) -> bool:
    """Steps and plans hold it so; beyond is infinity, and 0 times that no number."""
    return abs(value) <= float(np.finfo(np.float32).max)


def shares_of(wanted: Mapping[int, float] | None, usual: Sequence[float]) -> tuple[float, ...]:
    """How much a request gets of each adapter. wanted: by number, 0 where it says nothing of one;
    None: what is usual. Raises RequestError."""
    if wanted is None:
        return tuple(usual)
    for number, share in wanted.items():
        if not 0 <= number < len(usual):
            raise RequestError(
                f"there is no adapter {number}; this model has {len(usual)}", field="lora"
            )
        check_share(share)
    return tuple(wanted.get(number, 0.0) for number in range(len(usual)))


def salted(salt: bytes, shares: Sequence[float]) -> bytes:
    """Prefixes are shared among those alone who get as much of each adapter."""
    return np.array(shares, "<f4").tobytes() + salt


def _check_kind(file: GGUFFile, arch: str) -> None:
    meta = file.metadata
    if meta.get("general.type") != "adapter":
        raise FileFormatError(f"{file.path}: is not an adapter, general.type is not 'adapter'")
    if meta.get("adapter.type") != "lora":
        raise UnsupportedError(
            f"{file.path}: adapters of type {meta.get('adapter.type')!r} are not supported, "
            "only 'lora'"
        )
    if "adapter.alora.invocation_tokens" in meta:
        raise UnsupportedError(
            f"{file.path}: adapters that tokens of the prompt switch on (aLoRA) are not supported"
        )
    if meta.get("general.architecture") != arch:
        raise FileFormatError(
            f"{file.path}: is an adapter of {meta.get('general.architecture')!r}, the model is "
            f"of {arch!r}"
        )


def _check_tensors(file: GGUFFile) -> None:
    if not file.tensors:
        raise FileFormatError(f"{file.path}: has no tensors; fetch it again")
    for name, tensor in file.tensors.items():
        stem, suffix = name[:-7], name[-7:]
        if suffix not in _FACTORS:
            raise UnsupportedError(f"{file.path}: tensor {name!r} is no factor (.lora_a, .lora_b)")
        other = f"{stem}{_FACTORS[suffix == _FACTORS[0]]}"
        if other not in file.tensors:
            raise FileFormatError(f"{file.path}: has {name!r}, but not {other!r}; fetch it again")
        if tensor.format.name not in FLOAT_FORMATS:
            raise UnsupportedError(
                f"{file.path}: tensor {name!r} is {tensor.format.name}; convert the adapter to "
                "F16, BF16 or F32"
            )
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{file.path}: tensor {name!r} has {len(tensor.shape)} dimensions, expected 2"
            )
