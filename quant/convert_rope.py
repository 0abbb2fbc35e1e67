"""Rotary settings of a config.json as GGUF metadata and as tensors of divisors.

Owns: both spellings of the settings (`rope_scaling`, and `rope_parameters` of transformers 5) and
the kinds of scaling. Must not know: architectures or weights. Formulas: `transformers` 5.24,
modeling_rope_utils; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import FileFormatError, UnsupportedError

_GLOBAL = "full_attention"
FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RopeKeys:
    metadata: dict[str, Any]  # without the architecture's prefix
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Divisors of the frequencies by the name of their tensor, each float32 (n_rot / 2)."""
    n_rot: int = 0  # dims of a head that turn


_SECTIONS = "mrope_section"
_RARE = {
    "partial_rotary_factor": (None, 1),
    **dict.fromkeys(("alpha", "llama_4_scaling_beta", _SECTIONS), (None,)),
}


def rope_keys(
    config: Mapping[str, Any],
    head_dim: int,
    context: int,
    known: frozenset[str] = frozenset(),
    *,
    grows_queries: bool = False,
) -> RopeKeys:
    """Settings of the (global) layers; refuses kinds of scaling that are not supported, and rare
    settings that are not among those the class is known to have. grows_queries: where YaRN has an
    mscale_all_dim, scores grow with it, and cos and sin only with what mscale is more."""
    rope = _rope_of(config)
    for key, neutral in _RARE.items():
        value = rope.get(key, config.get(key))
        if key not in known and value not in neutral:
            raise UnsupportedError(f"config.json: {key} is {value!r:.80}, which is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    # No key tells readers whether the ends of YaRN's ramp are rounded: the architecture does.
    is_rounded = rope.get("truncate", True)
    if kind == "yarn" and is_rounded is not ("truncate" not in known):
        raise UnsupportedError(
            f"config.json: YaRN with truncate = {is_rounded!r:.80} is not supported"
        )
    convert = _KINDS.get(kind) if isinstance(kind, str) else None
    if convert is None:
        raise UnsupportedError(
            f"config.json: rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    share = _number(rope, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    n_rot = int(head_dim * share)
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise UnsupportedError(
            f"config.json: partial_rotary_factor is {share:g}, which turns {n_rot} of {head_dim} "
            "dims; expected an even number of them"
        )
    base = _number(rope, "rope_theta", config.get("rope_theta", 10000.0))
    original = _original_context(rope, config, context)
    found = convert(_Rope(rope, base, n_rot, original, context, grows_queries))
    return RopeKeys({"rope.freq_base": base, **found.metadata}, found.tensors, n_rot)


def rope_sections(config: Mapping[str, Any], default: Sequence[int]) -> list[int]:
    """Pairs of dims that turn by time, height and width, and by nothing: alike in texts, but other
    readers ask."""
    sections = _rope_of(config).get(_SECTIONS, default)
    is_whole = isinstance(sections, Sequence) and all(type(n) is int and n >= 0 for n in sections)
    if not is_whole or len(sections) != 3:
        raise FileFormatError(
            f"config.json: {_SECTIONS} is {sections!r:.80}, expected three numbers"
        )
    return [*sections, 0]


@dataclass(frozen=True)
class _Rope:
    """What the conversion of one kind of scaling reads."""

    values: Mapping[str, Any]  # the settings themselves
    base: float
    n_rot: int
    original: int  # tokens of the context before it was extended
    context: int
    grows_queries: bool


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get(_GLOBAL) is not None:
        rope = rope[_GLOBAL]
    if not isinstance(rope, dict):
        raise FileFormatError(f"config.json: rope settings are {rope!r}, expected a JSON object")
    return rope


def _original_context(rope: Mapping[str, Any], config: Mapping[str, Any], context: int) -> int:
    value = rope.get("original_max_position_embeddings")
    value = value or config.get("original_max_position_embeddings") or context
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FileFormatError(
            f"config.json: original_max_position_embeddings is {value!r}, expected a whole number"
        )
    return value


def _number(rope: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = rope.get(key)
    return positive(f"{key} of rope", default if value is None else value)


def positive(what: str, value: Any) -> float:
    """A number that a GGUF file holds as float32 without it becoming 0 or infinite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not _LEAST <= value <= _LARGEST:
        raise FileFormatError(
            f"config.json: {what} is {value!r:.80}, expected a number above 0 that float32 holds"
        )
    return float(value)


def _plain(rope: _Rope) -> RopeKeys:
    return RopeKeys({})


def _linear(rope: _Rope) -> RopeKeys:
    factor = _number(rope.values, "factor")
    return RopeKeys({"rope.scaling.type": "linear", "rope.scaling.factor": factor})


def _llama3(rope: _Rope) -> RopeKeys:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    factor = _number(rope.values, "factor")
    low, high = (_number(rope.values, f"{end}_freq_factor") for end in ("low", "high"))
    if high <= low:
        raise FileFormatError(
            f"config.json: high_freq_factor {high:g} of rope is not above low_freq_factor {low:g}"
        )
    wavelengths = 2 * math.pi * rope.base ** (np.arange(0, rope.n_rot, 2) / rope.n_rot)
    kept = np.clip((rope.original / wavelengths - low) / (high - low), 0, 1)
    return RopeKeys({}, {FREQS: (1 / ((1 - kept) / factor + kept)).astype(np.float32)})


def _longrope(rope: _Rope) -> RopeKeys:
    """Two lists of divisors, for contexts up to the original one and for longer ones."""
    tensors = {}
    for name, key in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
        values = rope.values.get(key)
        if not isinstance(values, list) or len(values) != rope.n_rot // 2:
            raise FileFormatError(
                f"config.json: {key} of rope does not name {rope.n_rot // 2} factors"
            )
        tensors[name] = np.array([positive(f"{key} of rope", v) for v in values], np.float32)
    grown = _number(rope.values, "factor", rope.context / rope.original)
    amplitude = math.sqrt(1 + math.log(grown) / math.log(rope.original)) if grown > 1 else 1.0
    keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": rope.original,
        "rope.scaling.attn_factor": _number(rope.values, "attention_factor", amplitude),
    }
    return RopeKeys(keys, tensors)


def _dynamic(rope: _Rope) -> RopeKeys:
    """Hunyuan's form of it, which depends on no length: another base."""
    alpha = rope.values.get("alpha")
    if not alpha:
        raise UnsupportedError("config.json: rope scaling 'dynamic' without alpha is not supported")
    grown = _number(rope.values, "alpha") ** (rope.n_rot / (rope.n_rot - 2))
    return RopeKeys({"rope.freq_base": rope.base * grown})


def _yarn(rope: _Rope) -> RopeKeys:
    values = rope.values
    factor = _number(values, "factor")
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.original,
        "rope.scaling.yarn_beta_fast": _number(values, "beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": _number(values, "beta_slow", 1.0),
    }
    known = _amplitude(factor)  # what readers make of the factor
    if values.get("llama_4_scaling_beta") is not None:  # Ministral 3, which has keys for the rest
        keys["attention.temperature_scale"] = _number(values, "llama_4_scaling_beta")
        cancelled = _number(values, "mscale_all_dim", 1.0)
        keys["rope.scaling.yarn_log_multiplier"] = cancelled
        known /= _amplitude(factor, cancelled)
    if rope.grows_queries and values.get("mscale_all_dim"):
        # Readers of latent attention find the usual 0.1 already in it, and cos and sin plain.
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * _number(values, "mscale_all_dim")
        known = 1.0
    extra = _yarn_amplitude(values, factor) / known
    if abs(extra - 1) > 1e-9:
        keys["rope.scaling.attn_factor"] = extra
    return RopeKeys(keys)


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """What cos and sin are multiplied by."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        over = _amplitude(factor, _number(rope, "mscale"))
        return over / _amplitude(factor, _number(rope, "mscale_all_dim"))
    return _amplitude(factor)


def _amplitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


_KINDS: dict[str, Callable[[_Rope], RopeKeys]] = {
    "default": _plain,
    "mrope": _plain,  # of texts
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "dynamic": _dynamic,
}
