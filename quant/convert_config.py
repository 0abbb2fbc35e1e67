"""What a checkpoint's config.json says, checked, as sizes and as metadata of a GGUF file.

Owns: reading keys into sizes. Must not know: tensors, tokenizers, files; the model classes are in
convert_families.py, what none of ours computes is refused in convert_refusals.py.

Key names are those of Hugging Face's `transformers` 5.24; the metadata keys are those of the `gguf`
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .convert_experts import SourceExperts, read_experts
from .convert_families import FAMILIES, family_of
from .convert_family import Family, HeadNorm, Windows
from .convert_gemma4 import Layered
from .convert_keys import ConfigKeys
from .convert_latent import SourceLatent, read_latent
from .convert_recurrent import ATTENTION, READERS, Recurrence, adjusted_ffn_dim, layer_kinds
from .convert_refusals import check_query_scale, check_rope_layers, refuse_unsupported
from .convert_rope import RopeKeys, positive, rope_keys, rope_sections
from .dense_keys import dense_keys
from .errors import FileFormatError, UnsupportedError

_LOCAL = "sliding_attention"

RANK = 4  # pooling type of models that score texts
_MAX_LAYERS = 4096  # a bound on what a hostile file can make us list; readers have the same


@dataclass(frozen=True)
class Settings:
    """A checked config."""

    family: Family
    n_layers: int
    dim: int
    ffn_dim: int  # 0: no layer is dense
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int | None  # None: as many rows as the embedding has
    context: int
    norm_eps: float
    is_tied: bool
    biased: tuple[str, ...]  # projections of a layer that have a bias
    is_local: tuple[bool, ...]  # layers that see only `window` positions
    window: int
    rope: RopeKeys  # of global layers
    rope_sections: list[int]  # [] where only time turns
    n_deepstack: int  # layers that get vectors of images; -1: no such architecture
    local_rope_base: float | None  # of local layers, where it is another one
    scales: Mapping[str, float]  # by the GGUF's key
    caps: Mapping[str, float]  # soft caps by the GGUF's key; 0: none
    query_scale: float  # scores are multiplied by it
    recurrence: Recurrence | None  # of layers without attention
    head_norm: HeadNorm
    experts: SourceExperts | None
    is_turned: bool  # positions turn queries and keys at all
    table_rows: Mapping[str, int]  # of the family's further embeddings
    n_labels: int  # of a classifier; 0: there is none
    layered: Layered | None  # sizes of layers that differ
    latent: SourceLatent | None
    n_nextn: int = 0  # blocks behind the layers that are written, too

    @property
    def n_blocks(self) -> int:
        """Of the file: layers, and blocks behind them."""
        return self.n_layers + self.n_nextn

    def has_rope(self, n: int) -> bool:
        """Whether positions turn the queries and keys of layer n."""
        if not self.is_turned:
            return False
        if self.family.rope_on_local_only and any(self.is_local):
            return self.is_local[n]
        every = self.family.no_rope_every
        return not every or (n + 1) % every != 0

    def metadata(self) -> dict[str, Any]:
        """The architecture's keys: int is uint32, float is float32."""
        keys: dict[str, Any] = {
            **dense_keys(
                n_layers=self.n_blocks,
                context=self.context,
                dim=self.dim,
                ffn_dim=self.ffn_dim,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                norm_eps=self.norm_eps,
                n_rot=self.rope.n_rot,
                is_centered=self.family.is_centered,
            ),
            **self.rope.metadata,
            **self.scales,
            **self.caps,
            **(self.experts.metadata if self.experts else {}),
        }
        if self.recurrence:
            keys |= self.recurrence.metadata
        if self.n_nextn:
            keys["nextn_predict_layers"] = self.n_nextn
            if named := keys.get("attention.recurrent_layers"):
                keys["attention.recurrent_layers"] = [*named, *[False] * self.n_nextn]
        if self.latent:
            keys |= self.latent.metadata
            if not self.experts:  # readers ask for these all the same
                keys |= {"leading_dense_block_count": self.n_blocks, "expert_shared_count": 0}
                keys["expert_feed_forward_length"] = self.ffn_dim
        if self.rope_sections:
            keys["rope.dimension_sections"] = self.rope_sections
        if self.n_deepstack >= 0:
            keys["n_deepstack_layers"] = self.n_deepstack
        if self.family.rope_switch:
            keys["rope.scaling.finetuned"] = self.is_turned
        if any(self.is_local):
            keys["attention.sliding_window"] = self.window
            if not all(self.is_local):
                keys["attention.sliding_window_pattern"] = list(self.is_local)
        if self.local_rope_base is not None:
            keys["rope.freq_base_swa"] = self.local_rope_base
        if not self.family.turns:
            keys = {key: value for key, value in keys.items() if not key.startswith("rope.")}
        if not self.family.is_causal:
            keys["attention.causal"] = False
        if self.n_labels:
            keys["pooling_type"] = RANK
        if self.layered:
            keys |= self.layered.metadata
        return {f"{self.family.arch}.{key}": value for key, value in keys.items()}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Refuses what cannot be converted, naming key and value."""
    family = _family(config)
    inner = config.get("text_config") or {}
    if not isinstance(inner, dict):
        raise FileFormatError("config.json: text_config is not a JSON object")
    # A null takes the place of a default, too: Mistral says so that it has no window.
    values = family.completed({**config, **inner})
    if "layers_block_type" in family.other_keys:  # they tell how many there are
        values.setdefault("num_hidden_layers", len(layer_kinds(values)))
    keys = ConfigKeys({key: value for key, value in values.items() if value is not None})
    refuse_unsupported(keys.values, family)
    n_layers, dim = keys.count("num_hidden_layers"), keys.count("hidden_size")
    if n_layers > _MAX_LAYERS:
        raise FileFormatError(
            f"config.json: num_hidden_layers is {n_layers}, at most {_MAX_LAYERS}"
        )
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise FileFormatError(
            f"config.json: {heads} attention heads are not a multiple of {kv_heads} kv heads"
        )
    latent = read_latent(keys) if family.is_latent else None
    if not latent and "head_dim" not in keys.values and dim % heads:
        raise FileFormatError(f"config.json: {dim} values do not divide into {heads} heads")
    head_dim = latent.n_rot if latent else keys.count("head_dim", dim // heads)
    if head_dim % 2:
        raise FileFormatError(f"config.json: head_dim is {head_dim}, expected an even number")
    recurrence = READERS[family.recurrence](keys) if family.recurrence else None
    is_local = (False,) * n_layers if recurrence else _local_layers(keys, family, n_layers)
    context = keys.count("max_position_embeddings")
    check_rope_layers(keys, family, is_local)
    check_query_scale(keys, family, n_layers, dim // heads, head_dim)
    scales = {new: keys.number(old) for old, new in family.scales.items()}
    query_scale = scales.get("attention.scale") or _query_width(keys, head_dim) ** -0.5
    ffn_dim = _ffn_dim(keys, family)
    layered = Layered.of(keys, is_local) if family.is_layered else None
    experts = None
    if family.experts:
        experts = read_experts(keys.values, family.experts, ffn_dim, n_layers)
    return Settings(
        family=family,
        n_layers=n_layers,
        dim=dim,
        ffn_dim=ffn_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size") if "vocab_size" in keys.values else None,
        context=context,
        norm_eps=keys.number(family.eps_key),
        is_tied=bool(keys.values.get("tie_word_embeddings", False)) or not family.is_causal,
        biased=_biased(keys, family),
        is_local=is_local,
        window=keys.count("sliding_window") if any(is_local) else 0,
        rope=layered.rope(keys.values)
        if layered
        else rope_keys(
            keys.values, head_dim, context, family.rope_settings, grows_queries=family.is_latent
        ),
        rope_sections=rope_sections(keys.values, family.rope_sections)
        if family.rope_sections
        else [],
        n_deepstack=_n_deepstack(keys.values) if family.has_deepstack else -1,
        local_rope_base=_local_rope_base(keys) if family.plain_local_rope else None,
        scales=scales,
        caps={key: _cap(keys.values, key) for key in family.caps},
        query_scale=query_scale,
        recurrence=recurrence,
        head_norm=_head_norm(keys, family),
        experts=experts,
        is_turned=family.turns
        and (not family.rope_switch or keys.values.get(family.rope_switch) == "rope"),
        table_rows={name: keys.count(key) for name, key in family.tables.items()},
        n_labels=_n_labels(keys) if family.classifier else 0,
        layered=layered,
        latent=latent,
    )


def _n_deepstack(config: Mapping[str, Any]) -> int:
    vision = config.get("vision_config")
    layers = vision.get("deepstack_visual_indexes", []) if isinstance(vision, dict) else []
    return len(layers) if isinstance(layers, list) else 0


def _n_labels(keys: ConfigKeys) -> int:
    labels = keys.values.get("id2label", {"0": "", "1": ""})
    if not isinstance(labels, dict) or not labels:
        raise FileFormatError(f"config.json: id2label is {labels!r:.80}, no table of labels")
    return len(labels)


def _head_norm(keys: ConfigKeys, family: Family) -> HeadNorm:
    key = family.optional_head_norm
    return HeadNorm.HEADS if key and keys.values.get(key) else family.head_norm


def _ffn_dim(keys: ConfigKeys, family: Family) -> int:
    """Of a dense layer; 0 where there is none and nothing is said."""
    if family.adjusts_ffn:
        return adjusted_ffn_dim(keys)
    experts = family.experts
    if experts and experts.dim and not experts.first and family.ffn_key not in keys.values:
        return 0
    return keys.count(family.ffn_key)


def _cap(config: Mapping[str, Any], key: str) -> float:
    """A null, which takes the place of a default, says that there is none."""
    return 0.0 if config.get(key) is None else positive(key, config[key])


def _biased(keys: ConfigKeys, family: Family) -> tuple[str, ...]:
    if family.biased:
        return family.biased
    return tuple(
        part for key, parts in family.biases.items() for part in parts if keys.values.get(key)
    )


def _query_width(keys: ConfigKeys, head_dim: int) -> float:
    scalar = "query_pre_attn_scalar"
    return keys.number(scalar) if scalar in keys.values else float(head_dim)


def _family(config: Mapping[str, Any]) -> Family:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedError(f"config.json: architectures is {classes!r}; convertible: {known}")
    return family_of(name, config)


def _local_layers(keys: ConfigKeys, family: Family, n_layers: int) -> tuple[bool, ...]:
    if family.windows is Windows.ALL:
        # A window as long as the context hides nothing.
        context = keys.count("max_position_embeddings")
        return (keys.count("sliding_window", context) < context,) * n_layers
    has_windows = family.windows is Windows.LAYERS and "sliding_window" in keys.values
    kinds = keys.values.get("layer_types")
    if kinds is None and "global_attn_every_n_layers" in keys.values:
        first = keys.count("global_attn_every_n_layers")
        return tuple(n % first != 0 for n in range(n_layers))
    if kinds is None:
        every = keys.values.get("sliding_window_pattern") if has_windows else 1
        if isinstance(every, str) and set(every) == {"L", "G"}:  # one period, local and global
            return tuple(every[n % len(every)] == "L" for n in range(n_layers))
        every = ConfigKeys({"sliding_window_pattern": every}).count("sliding_window_pattern")
        return tuple((n + 1) % every != 0 for n in range(n_layers))
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise FileFormatError(f"config.json: layer_types does not name {n_layers} layers")
    for kind in kinds:
        if kind not in ((*ATTENTION, _LOCAL) if has_windows else ATTENTION):
            raise UnsupportedError(f"config.json: layer type {kind!r} is not supported")
    return tuple(kind == _LOCAL for kind in kinds)


def _local_rope_base(keys: ConfigKeys) -> float:
    """Local layers have a base of their own and are never stretched."""
    ropes = keys.values.get("rope_parameters") or {}
    local = ropes.get(_LOCAL) if isinstance(ropes, dict) else None
    if local is None:
        key = "rope_local_base_freq" if "rope_local_base_freq" in keys.values else "rope_theta"
        return ConfigKeys({"rope_theta": 1e4, **keys.values}).number(key)
    kind = local.get("rope_type", "default") if isinstance(local, dict) else None
    if kind != "default":
        raise UnsupportedError(f"config.json: rope {kind!r} of local layers is not supported")
    return ConfigKeys({"rope_theta": 1e4, **local}).number("rope_theta")
