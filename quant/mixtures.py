"""llama.cpp's presets by name: which tensor of a model gets which format.

Owns: the rules of each preset, what is never quantized, and what a row takes that the wanted
format does not divide. Must not know: weights, files, how a format is encoded.
The facts are those of llama-quantize (src/llama-quant.cpp, build 11434), and the choice is the
same tensor by tensor for every architecture without rules of its own there (Falcon has some).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .errors import FileFormatError, UnsupportedError
from .formats import FORMATS

# A format that rows do not fill gives way to the next; what does not fit either becomes F16.
FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
# Parts of names of matrices that are small, or whose rounding would do harm.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel"
    r"|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight"
    r"|attn_rel_b\.weight|\.position_embd|sam\.(pos_embd|neck\.|net_)|\.rel_pos"
    r"|\.patch_embd|\.patch_merger|a\.rvq\.codebook|mm\.a\.code_embd"
    r"|^position_embd\.weight$|^token_types\.weight$"
)
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_ROLES = (  # the first that a name contains
    ("attn_v", re.compile(r"attn_qkv\.weight|attn_kv_b\.weight|attn_v\.weight")),
    ("attn_k", re.compile(r"attn_k\.weight")),
    ("attn_output", re.compile(r"attn_output\.weight")),
    ("ffn_down", re.compile(r"ffn_down")),
)


@dataclass(frozen=True)
class Place:
    """Where a tensor stands: the i-th of n of its role, in a model of this kind."""

    i: int
    n: int
    is_gqa4: bool  # four or more query heads to a key head
    has_imatrix: bool


Rule = Callable[[Place], str | None]  # None: the format of the body


def always(format_name: str) -> Rule:
    return lambda place: format_name


def first(count: int, format_name: str, otherwise: str | None = None) -> Rule:
    return lambda place: format_name if place.i < count else otherwise


def early(share: int, format_name: str, otherwise: str | None = None) -> Rule:
    """The first 1/share of the layers."""
    return lambda place: format_name if place.i < place.n // share else otherwise


def more(format_name: str) -> Rule:
    """The first and last eighth of the layers, and every third between."""

    def rule(place: Place) -> str | None:
        eighth = place.n // 8
        is_more = place.i < eighth or place.i >= 7 * place.n // 8 or (place.i - eighth) % 3 == 2
        return format_name if is_more else None

    return rule


def gqa4(format_name: str, otherwise: str | None = None) -> Rule:
    return lambda place: format_name if place.is_gqa4 else otherwise


def with_imatrix(rule: Rule) -> Rule:
    return lambda place: rule(place) if place.has_imatrix else None


def without_imatrix(rule: Rule) -> Rule:
    return lambda place: None if place.has_imatrix else rule(place)


def as_body(place: Place) -> str | None:
    return None


@dataclass(frozen=True)
class Preset:
    name: str
    file_type: int  # general.file_type
    body: str
    attn_v: Rule = as_body
    ffn_down: Rule = as_body
    attn_output: Rule = as_body
    eight_experts_output: str | None = None  # attn_output of models with exactly 8 experts
    experts: str | None = None  # all matrices of experts


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("F32", 0, "F32"),
        Preset("F16", 1, "F16"),
        Preset("BF16", 32, "BF16"),
        Preset("Q4_0", 2, "Q4_0", ffn_down=with_imatrix(early(8, "Q4_1"))),
        Preset("Q4_1", 3, "Q4_1"),
        Preset("Q5_0", 8, "Q5_0", ffn_down=with_imatrix(early(8, "Q5_1"))),
        Preset("Q5_1", 9, "Q5_1"),
        Preset("Q8_0", 7, "Q8_0"),
        Preset("Q2_K", 10, "Q2_K", gqa4("Q4_K", "Q3_K"), always("Q3_K"), always("Q3_K"), "Q5_K"),
        Preset("Q3_K_S", 11, "Q3_K", eight_experts_output="Q5_K"),
        Preset(
            "Q3_K_M", 12, "Q3_K", first(2, "Q5_K", "Q4_K"), early(16, "Q5_K", "Q4_K"),
            always("Q4_K"), "Q5_K",
        ),
        Preset("Q3_K_L", 13, "Q3_K", always("Q5_K"), always("Q5_K"), always("Q5_K")),
        Preset("Q4_K_S", 14, "Q4_K", first(4, "Q5_K"), early(8, "Q5_K"), as_body, "Q5_K"),
        Preset("Q4_K_M", 15, "Q4_K", more("Q6_K"), more("Q6_K"), as_body, "Q5_K"),
        Preset("Q5_K_S", 16, "Q5_K"),
        Preset("Q5_K_M", 17, "Q5_K", more("Q6_K"), more("Q6_K")),
        Preset("Q6_K", 18, "Q6_K"),
        Preset(
            "IQ4_NL", 25, "IQ4_NL", gqa4("Q5_K"), without_imatrix(early(8, "Q5_K")), as_body, "Q5_K"
        ),
        Preset(
            "IQ4_XS", 30, "IQ4_XS", gqa4("Q5_K"), without_imatrix(early(8, "Q5_K")), as_body, "Q5_K"
        ),
        Preset("MXFP4_MOE", 38, "Q8_0", experts="MXFP4"),
    )
}  # fmt: skip
# What people write for a preset by the name of its body.
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def find_preset(name: str) -> Preset:
    known = ALIASES.get(name.upper(), name.upper())
    if known not in PRESETS:
        raise UnsupportedError(f"no type is called {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[known]


def fitting(format_name: str, cols: int) -> str:
    """The format itself, or what takes its place for rows of this length."""
    if cols % FORMATS[format_name].block == 0:
        return format_name
    second = FALLBACKS.get(format_name, format_name)
    return second if cols % FORMATS[second].block == 0 else "F16"


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a preset has a say in this tensor at all; the others keep what they are."""
    n_dims = len(shape)
    while n_dims > 1 and shape[len(shape) - n_dims] == 1:  # as GGUF counts dimensions
        n_dims -= 1
    return n_dims > 1 and name.endswith("weight") and _KEPT.search(name) is None


@dataclass(frozen=True)
class Overrides:
    """What the caller decides; a pattern is searched in the name, the first that fits counts."""

    patterns: Sequence[tuple[str, str]] = ()  # (regular expression, format)
    output: str | None = None
    embedding: str | None = None
    is_pure: bool = False  # every matrix the format of the body


def mixture(
    preset: Preset,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    has_imatrix: bool = False,
    overrides: Overrides | None = None,
) -> dict[str, str]:
    """The format of every tensor that is quantized; arguments and order as of `choices`."""
    chosen = choices(preset, metadata, shapes, has_imatrix=has_imatrix, overrides=overrides)
    return {name: choice.format for name, choice in chosen.items()}


class Choice(NamedTuple):
    format: str
    wanted: str  # by the rules; another one than `format` where rows do not fill its blocks


def choices(
    preset: Preset,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    has_imatrix: bool = False,
    overrides: Overrides | None = None,
) -> dict[str, Choice]:
    """Of every tensor that is quantized; the others are not named.

    shapes are in NumPy order, metadata is that of the model's file. The order of both does not
    matter: tensors are visited by layer, then by name, as llama.cpp does.
    """
    overrides = overrides or Overrides()
    chooser = _Chooser(preset, metadata, list(shapes), has_imatrix, overrides)
    chosen = {}
    for name in sorted(shapes, key=_by_layer):
        if is_quantized(name, shapes[name]):
            chosen[name] = chooser.choose(name, shapes[name][-1])
    return chosen


def _by_layer(name: str) -> tuple[int, bytes]:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1, name.encode()


class _Chooser:
    """Visits tensors in order; some rules go by how many of a role came before."""

    def __init__(
        self,
        preset: Preset,
        metadata: Mapping[str, Any],
        names: list[str],
        has_imatrix: bool,
        overrides: Overrides,
    ) -> None:
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise FileFormatError(f"general.architecture is {arch!r:.80}, expected a name")
        heads = _first(metadata, f"{arch}.attention.head_count", 1)
        kv_heads = _first(metadata, f"{arch}.attention.head_count_kv", heads)
        self.preset = preset
        self.overrides = overrides
        self.has_imatrix = has_imatrix
        self.n_layers = _count(f"{arch}.block_count", metadata.get(f"{arch}.block_count", 0))
        self.n_experts = _count(f"{arch}.expert_count", metadata.get(f"{arch}.expert_count", 0))
        self.is_gqa4 = kv_heads > 0 and heads // kv_heads >= 4
        self.is_70b = arch in ("llama", "qwen2") and self.n_layers == 80 and heads != kv_heads
        self.is_tied = "output.weight" not in names
        self.n_attn_v = sum(_role(name) == "attn_v" for name in names)
        self.seen = {"attn_v": 0, "ffn_down": 0}

    def choose(self, name: str, cols: int) -> Choice:
        for tensors, override in (
            (_EMBEDDINGS, self.overrides.embedding),
            (("output.weight",), self.overrides.output),
        ):
            if override and name in tensors:  # refused later where it does not fit
                return Choice(override, override)
        wanted = self.wanted(name)
        return Choice(fitting(wanted, cols), wanted)

    def wanted(self, name: str) -> str:
        body = self.preset.body
        if FORMATS[body].block == 1:
            return body
        for pattern, format_name in self.overrides.patterns:
            if re.search(pattern, name):
                return format_name
        return body if self.overrides.is_pure else self.preferred(name)

    def preferred(self, name: str) -> str:
        body = self.preset.body
        if self.preset.experts and "_exps." in name:
            return self.preset.experts
        if name == "output.weight" or (self.is_tied and name in _EMBEDDINGS):
            return self.overrides.output or ("Q8_0" if body == "Q8_0" else "Q6_K")
        role = _role(name)
        if role == "attn_v":
            return self.attn_v()
        if role == "attn_k" and self.n_experts == 8:
            return "Q8_0"
        if role == "ffn_down":
            return self.ffn_down(name)
        if role == "attn_output":
            if self.n_experts == 8:
                return self.preset.eight_experts_output or body
            return self.preset.attn_output(self.place(0, 1)) or body
        return body

    def attn_v(self) -> str:
        place = self.place(self.seen["attn_v"], self.n_attn_v)
        self.seen["attn_v"] += 1
        if self.n_experts == 8:
            return "Q8_0"
        chosen = self.preset.attn_v(place) or self.preset.body
        # Its few key heads make attn_v an eighth of attn_q: more bits cost next to nothing.
        return "Q5_K" if self.is_70b and chosen in ("Q3_K", "Q4_K") else chosen

    def ffn_down(self, name: str) -> str:
        # Experts' tensors may be several to a layer, so there the name tells the layer.
        i = _by_layer(name)[0] if self.n_experts > 1 else self.seen["ffn_down"]
        self.seen["ffn_down"] += 1
        return self.preset.ffn_down(self.place(i, self.n_layers)) or self.preset.body

    def place(self, i: int, n: int) -> Place:
        return Place(i, n, self.is_gqa4, self.has_imatrix)


def _role(name: str) -> str | None:
    return next((role for role, pattern in _ROLES if pattern.search(name)), None)


def _first(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """A count, or the first layer's of counts that differ by layer."""
    value = metadata.get(key, default)
    if isinstance(value, (list, np.ndarray)):
        value = value[0] if len(value) else None
    return _count(key, value)


def _count(key: str, value: Any) -> int:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < 0:
        raise FileFormatError(f"{key} is {value!r:.80}, expected a whole number")
    return int(value)
