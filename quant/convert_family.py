"""How checkpoints of one kind of model classes differ from those of others: the row of a table.

Owns: the row, its defaults, and names of tensors that are fused. Must not know: which classes there
are (convert_families.py), config.json's values, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .convert_experts import ExpertKeys

# Rope settings of some classes.
PARTIAL_ROPE, SECTIONED_ROPE = frozenset({"partial_rotary_factor"}), frozenset({"mrope_section"})


class HeadNorm(Enum):
    """RMS norms of queries and keys."""

    NONE = 0
    HEADS = 1  # of every head, before rope
    WHOLE = 2  # of all heads at once, before rope
    AFTER_ROPE = 3  # of every head, after rope


class Nextn(Enum):
    """Whether checkpoints may have blocks that predict further tokens behind the last layer."""

    NEVER = 0
    LEFT_OUT = 1  # of the file: nothing runs them
    WRITTEN = 2


class Windows(Enum):
    """Which layers see only a window of positions."""

    NEVER = 0
    ALL = 1  # where the config has a window
    LAYERS = 2  # those that layer_types or a pattern name


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms by their place; "": there is none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    def names(self) -> tuple[str, ...]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name)


QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # where they are fused
SHARED_GATE_UP = "mlp.shared_experts.gate_up_proj"
QKV_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION_PARTS = (*QKV_PARTS, "self_attn.o_proj")
MLP_PARTS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Family:
    """Model classes that one `general.architecture` runs, and how their checkpoints differ."""

    arch: str
    activation: str = "silu"
    activation_aliases: tuple[str, ...] = ()  # other names that the model takes for it
    norms: Norms = Norms()
    is_parallel: bool = False  # attention and MLP read the same rows, both add to the stream
    is_centered: bool = False  # norms are LayerNorms
    norm_offset: float = 0.0  # the model adds it to norm weights, the GGUF holds the sum
    head_norm: HeadNorm = HeadNorm.NONE
    has_sinks: bool = False  # every head has a score more, whose value is 0
    nextn: Nextn = Nextn.NEVER
    optional_head_norm: str = ""  # a key that says whether every head is normed, before rope
    head_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    rope_pairs: bool = False  # GGUF turns neighbouring dims: rows of q and k change their order
    source_pairs: bool = False  # the model itself turns neighbouring dims
    has_deepstack: bool = False  # vectors of images are added behind some layers
    scales_embedding: bool = False  # by sqrt(dim)
    windows: Windows = Windows.NEVER
    rope_on_local_only: bool = False  # in models with a window, global layers have no rope
    no_rope_every: int = 0  # layer l has no rope when (l + 1) mod n = 0
    plain_local_rope: bool = False  # rope scaling is for global layers alone
    rope_settings: frozenset[str] = frozenset()  # that only some classes know
    rope_sections: tuple[int, ...] = ()  # of dims that turn by time, height and width; (): no such
    keeps_fused: tuple[str, ...] = ()  # tensors that stay fused in the GGUF
    biased: tuple[str, ...] = ()  # projections that have a bias whatever the config says
    biases: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"attention_bias": ATTENTION_PARTS, "mlp_bias": MLP_PARTS}
    )  # projections that have one where a key says so
    scales: Mapping[str, str] = field(default_factory=dict)  # keys of config.json and of the GGUF
    caps: tuple[str, ...] = ()  # keys of soft caps that the GGUF has under the same name
    divides_logits: bool = False  # by their scale, instead of multiplying
    wide_query_layers: int = 0  # with so many layers the query scale is that of dim / heads
    experts: ExpertKeys | None = None  # None: every layer is dense
    is_latent: bool = False  # keys and values are compressed: convert_latent.py
    recurrence: str = ""  # of layers without attention: a row of convert_recurrent.READERS
    rope_switch: str = ""  # a key whose value "rope" says that positions turn q and k at all
    ffn_key: str = "intermediate_size"
    adjusts_ffn: bool = False  # it is not yet the width
    renames: Mapping[str, str] = field(default_factory=dict)  # parts of names, to those of others
    is_layered: bool = False  # sizes of layers differ as Gemma 4's do
    turns: bool = True  # positions turn queries and keys
    is_causal: bool = True
    tables: Mapping[str, str] = field(default_factory=dict)  # more embeddings: keys of their rows
    embedding_norm: str = ""  # of what is embedded
    skips_first_norm: bool = False  # before attention of layer 0
    classifier: str = ""  # gives labels, of what the pooler makes of a row
    has_gate: bool = True  # in the MLP
    other_keys: Mapping[str, str] = field(default_factory=dict)  # that some configs have
    own_names: Mapping[str, str] = field(default_factory=dict)  # parts that the GGUF calls thus
    final_norm: str = "model.norm"
    eps_key: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with the keys that other families have, and with defaults."""
        aliased = {self.other_keys.get(key, key): value for key, value in config.items()}
        return {**self.defaults, **aliased}

    def renamed(self, name: str) -> str:
        """A tensor's name with the parts that other families have."""
        for old, new in self.renames.items():
            name = name.replace(old, new)
        return name


# Some classes are several architectures: which one, their config says.
FamilyChoice = Family | Callable[[Mapping[str, Any]], Family]


def base_keys(context: int, eps: float, **others: Any) -> dict[str, Any]:
    return {"max_position_embeddings": context, "rms_norm_eps": eps, **others}
