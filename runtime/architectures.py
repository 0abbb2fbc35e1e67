"""The known values of `general.architecture`, and what a file of each may leave unsaid.

Owns: defaults of absent keys, and which keys change an architecture's arithmetic. Must not know:
files, tensors or ops; how layers are put together is in runtime/models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .experts import ExpertDefaults
from .ops import Gating


@dataclass(frozen=True)
class Architecture:
    scales_embedding: bool = False  # rows of the embedding are multiplied by sqrt(dim)
    window: int = 0  # of local layers, where the file names none
    local_every: int = 0  # sliding_window_pattern: layer l is local when l mod n < n - 1
    local_rope_base: float | None = None  # None: the same as on global layers
    plain_local_rope: bool = False  # rope scaling is for global layers alone
    rope_on_local_only: bool = False  # in models with a window, global layers have no rope
    no_rope_every: int = 0  # layer l has no rope when (l + 1) mod n = 0
    has_sinks: bool = False  # every head has one more score, whose value is 0
    exact_yarn: bool = False  # the ends of YaRN's ramp are not rounded to whole dims
    has_rope_switch: bool = False  # rope.scaling.finetuned = false means no rope at all
    wide_query_layers: int = 0  # with so many layers the query scale is that of dim / heads
    is_centered: bool = False  # norms are LayerNorms
    attention_scale: float = 0.0  # of scores, where the file says nothing; 0: by the head's size
    is_causal: bool = True  # attention.causal; else rows see those after them, too
    global_first: bool = False  # of every n layers the first is the global one
    divides_logits: bool = False  # by logit_scale, instead of multiplying
    experts: ExpertDefaults | None = None  # None: no file has any
    attention_cap: float = 0.0  # scores are cap * tanh(score / cap), where the file says nothing
    logit_cap: float = 0.0  # the same of logits
    is_latent: bool = False  # keys are compressed, and hold the values
    recurrence: str = ""  # of layers without attention: a row of recurrence.READERS
    has_both: bool = False  # layers are recurrent beside their attention
    has_one_part: bool = False  # a layer is recurrent, attention or an MLP, and nothing else
    attention_every: int = 0  # full_attention_interval: layer l has it when (l + 1) mod n = 0
    supports: frozenset[str] = frozenset()  # of config.RESTRICTED


_GRANITE = frozenset({"logit_scale", "residual_scale"})
_NEMOTRON = Architecture(no_rope_every=1, recurrence="Mamba-2", has_one_part=True)
_NEXTN = frozenset({"nextn_predict_layers"})  # the last blocks predict further tokens
_QWEN35 = Architecture(recurrence="delta net", attention_every=4, supports=_NEXTN)
_YARN_MULTIPLIER = frozenset({"rope.scaling.yarn_log_multiplier"})
_MISTRAL3 = frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"})

ARCHITECTURES: dict[str, Architecture] = {
    "bailingmoe2": Architecture(experts=ExpertDefaults(Gating.SIGMOID), supports=_NEXTN),
    "bert": Architecture(no_rope_every=1, is_centered=True, is_causal=False),
    "cohere2": Architecture(
        local_every=4,
        rope_on_local_only=True,
        is_centered=True,
        supports=frozenset({"logit_scale"}),
    ),
    "deepseek2": Architecture(
        is_latent=True,
        experts=ExpertDefaults(sigmoid_vocab=154880),  # those of GLM-4.7-Flash
        supports=_NEXTN | _YARN_MULTIPLIER,
    ),
    "ernie4_5": Architecture(),
    "ernie4_5-moe": Architecture(experts=ExpertDefaults(renormalize=True)),
    "exaone4": Architecture(local_every=4, rope_on_local_only=True),
    "falcon-h1": Architecture(recurrence="Mamba-2", has_both=True),
    "gemma": Architecture(scales_embedding=True),
    "gemma2": Architecture(
        scales_embedding=True,
        window=4096,
        local_every=2,
        wide_query_layers=46,
        attention_cap=50.0,
        logit_cap=30.0,
    ),
    "gemma-embedding": Architecture(
        scales_embedding=True,
        local_every=6,
        local_rope_base=10000.0,
        plain_local_rope=True,
        is_causal=False,
    ),
    "gemma3": Architecture(
        scales_embedding=True,
        local_every=6,
        local_rope_base=10000.0,
        plain_local_rope=True,
        wide_query_layers=62,
    ),
    "gemma4": Architecture(
        scales_embedding=True,
        local_rope_base=10000.0,
        plain_local_rope=True,
        attention_scale=1.0,
        experts=ExpertDefaults(renormalize=True),
    ),
    "glm4": Architecture(),
    "glm4moe": Architecture(experts=ExpertDefaults(Gating.SIGMOID), supports=_NEXTN),
    "gpt-oss": Architecture(
        window=128,
        local_every=2,
        has_sinks=True,
        exact_yarn=True,
        experts=ExpertDefaults(Gating.CHOSEN),
    ),
    "granite": Architecture(has_rope_switch=True, divides_logits=True, supports=_GRANITE),
    "granitehybrid": Architecture(
        has_rope_switch=True,
        divides_logits=True,
        experts=ExpertDefaults(renormalize=True),
        recurrence="Mamba-2",
        supports=_GRANITE,
    ),
    "granitemoe": Architecture(
        has_rope_switch=True,
        divides_logits=True,
        experts=ExpertDefaults(renormalize=True),
        supports=_GRANITE,
    ),
    "hunyuan-dense": Architecture(),
    "lfm2": Architecture(recurrence="short convolution"),
    "lfm2moe": Architecture(
        recurrence="short convolution", experts=ExpertDefaults(Gating.SIGMOID, renormalize=True)
    ),
    "llama": Architecture(experts=ExpertDefaults(renormalize=True)),
    "mistral3": Architecture(supports=_MISTRAL3),
    "modern-bert": Architecture(
        local_every=3,
        global_first=True,
        is_centered=True,
        is_causal=False,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(_NEMOTRON, experts=ExpertDefaults(Gating.SIGMOID)),
    "nomic-bert": Architecture(is_centered=True, is_causal=False),
    "nomic-bert-moe": Architecture(is_centered=True, is_causal=False, experts=ExpertDefaults()),
    "olmo2": Architecture(local_every=4, plain_local_rope=True),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(experts=ExpertDefaults()),
    "qwen2vl": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(experts=ExpertDefaults(renormalize=True)),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, experts=ExpertDefaults(renormalize=True)),
    "qwen3next": replace(_QWEN35, experts=ExpertDefaults(renormalize=True)),
    "qwen3vl": Architecture(),
    "qwen3vlmoe": Architecture(experts=ExpertDefaults(renormalize=True)),
    "smollm3": Architecture(no_rope_every=4),
}
