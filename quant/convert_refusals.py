"""What a config.json may say that no architecture of ours computes, or no key of GGUF can tell.

Owns: these refusals, which name key and value. Must not know: tensors, files, metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .convert_family import Family, Nextn
from .convert_keys import ConfigKeys
from .errors import UnsupportedError

# Keys that change the arithmetic in ways that nothing here implements, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "use_bidirectional_attention": (False, "vision"),
    "use_sliding_window": (False,),
    "is_causal": (True,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "num_nextn_predict_layers": (0,),
    "rotary_pct": (1, 1.0),
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def refuse_unsupported(given: Mapping[str, Any], family: Family) -> None:
    for key in _CAPS:
        if key in given and key not in family.caps:
            raise UnsupportedError(f"config.json: {key} is {given[key]!r}, which is not supported")
    for key, neutral in _NEUTRAL.items():
        if (family.experts and key in family.experts.count) or (
            family.nextn is not Nextn.NEVER and key == "num_nextn_predict_layers"
        ):
            continue
        if not family.is_causal and key in ("is_causal", "use_bidirectional_attention"):
            continue
        if family.is_layered and key == "num_experts":
            continue
        if key in given and given[key] not in neutral:
            shown = given[key]
            if _is_packed(shown, family):
                continue
            if key == "quantization_config" and isinstance(shown, dict):
                shown = shown.get("quant_method")
            raise UnsupportedError(f"config.json: {key} is {shown!r}, which is not supported")
    activation = given.get("hidden_activation", given.get("hidden_act", family.activation))
    if activation not in (family.activation, *family.activation_aliases):
        raise UnsupportedError(
            f"config.json: activation {activation!r} is not supported for {family.arch}, "
            f"only {family.activation!r}"
        )


def _is_packed(quantization: Any, family: Family) -> bool:
    """Blocks that are read as they are."""
    if not isinstance(quantization, dict) or not family.experts or not family.experts.takes_turns:
        return False
    return bool(quantization.get("quant_method") == "mxfp4")


def check_query_scale(
    keys: ConfigKeys, family: Family, n_layers: int, width: int, head_dim: int
) -> None:
    """GGUF has no key for it that other readers of gemma3 honour; they follow this rule."""
    if "query_pre_attn_scalar" not in family.defaults:
        return
    scalar = keys.number("query_pre_attn_scalar")
    expected = width if n_layers == family.wide_query_layers else head_dim
    if scalar != expected:
        raise UnsupportedError(
            f"config.json: query_pre_attn_scalar is {scalar:g}, only {expected} is supported "
            f"for {n_layers} layers of head_dim {head_dim}"
        )


def check_rope_layers(keys: ConfigKeys, family: Family, is_local: tuple[bool, ...]) -> None:
    """GGUF has no key for the layers without rope; readers follow one rule."""
    if family.rope_on_local_only and "sliding_window" in keys.values and not any(is_local):
        raise UnsupportedError(
            "config.json: sliding_window without a local layer, which leaves no layer with rope, "
            "is not supported"
        )
    every = family.no_rope_every
    if not every:
        return
    expected = [int((n + 1) % every != 0) for n in range(len(is_local))]
    found = keys.values.get("no_rope_layers")
    if found is None and keys.count("no_rope_layer_interval") != every:
        found = f"none in {keys.count('no_rope_layer_interval')}"
    if found not in (None, expected):
        raise UnsupportedError(
            f"config.json: no_rope_layers is {found!r:.80}, only every layer but each "
            f"{every}th with rope is supported"
        )
