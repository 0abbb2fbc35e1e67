"""Rotary settings of a config.json as GGUF metadata and, for Llama 3, as a tensor of divisors.

Owns: both spellings of the settings (`rope_scaling`, and `rope_parameters` of transformers 5) and
the kinds of scaling. Must not know: architectures or tensors. Formulas: `transformers` 5.24,
modeling_rope_utils; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import FileFormatError, UnsupportedError

_GLOBAL = "full_attention"
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RopeKeys:
    metadata: dict[str, Any]  # without the architecture's prefix
    divisors: np.ndarray | None = field(default=None, repr=False)  # float32 (head_dim / 2)


def rope_keys(config: Mapping[str, Any], head_dim: int, context: int) -> RopeKeys:
    """Settings of the (global) layers; refuses kinds of scaling that are not supported."""
    rope = _rope_of(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    convert = _KINDS.get(kind) if isinstance(kind, str) else None
    if convert is None:
        raise UnsupportedError(
            f"config.json: rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        raise UnsupportedError(
            f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']!r}, "
            "which is not supported"
        )
    base = _number(rope, "rope_theta", config.get("rope_theta", 10000.0))
    found = convert(rope, base, head_dim, _original_context(rope, config, context))
    return RopeKeys({"rope.freq_base": base, **found.metadata}, found.divisors)


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


def _plain(rope: Mapping[str, Any], base: float, head_dim: int, original: int) -> RopeKeys:
    return RopeKeys({})


def _linear(rope: Mapping[str, Any], base: float, head_dim: int, original: int) -> RopeKeys:
    factor = _number(rope, "factor")
    return RopeKeys({"rope.scaling.type": "linear", "rope.scaling.factor": factor})


def _llama3(rope: Mapping[str, Any], base: float, head_dim: int, original: int) -> RopeKeys:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if high <= low:
        raise FileFormatError(
            f"config.json: high_freq_factor {high:g} of rope is not above low_freq_factor {low:g}"
        )
    wavelengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return RopeKeys({}, (1 / ((1 - kept) / factor + kept)).astype(np.float32))


def _yarn(rope: Mapping[str, Any], base: float, head_dim: int, original: int) -> RopeKeys:
    if rope.get("truncate", True) is not True:
        raise UnsupportedError("config.json: YaRN with truncate = false is not supported")
    factor = _number(rope, "factor")
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": _number(rope, "beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": _number(rope, "beta_slow", 1.0),
    }
    # Readers multiply by this key what the factor alone gives.
    extra = _yarn_amplitude(rope, factor) / _amplitude(factor)
    if extra != 1:
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


_KINDS: dict[str, Callable[[Mapping[str, Any], float, int, int], RopeKeys]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
