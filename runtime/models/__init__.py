"""From an architecture's name to the function that records it.

A new architecture is one line in RECORDERS, with a file here where it is built otherwise than those
there are, and one row in architectures.ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..config import ModelConfig
from ..errors import UnsupportedError
from ..ops import Activation, BufferKind, RopeStyle
from ..plan import Plan
from ..plan_builder import PlanBuilder
from ..plan_recording import LowRank
from ..rope import DIVISOR_TENSORS
from ..weights import WeightSource, stored_name
from . import dense, encoders, gemma4, latent, mamba2, nextn, recurrent
from .blocks import HeadNorm, Recording, is_factor

Recorder = Callable[[Recording], None]
PAIR, HALF = RopeStyle.PAIR, RopeStyle.HALF
_GELU = Activation.GELU_TANH
_GLM4MOE: dict[str, Any] = {
    "style": HALF,
    "head_norm": HeadNorm.WHERE_PRESENT,
    "mlp_norm": "post_attention_norm",
}
RECORDERS: dict[str, Recorder] = {
    "bailingmoe2": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "bert": partial(encoders.post_norm, is_gated=False, activation=Activation.GELU_ERF),
    "cohere2": partial(dense.parallel, style=PAIR),
    "deepseek2": latent.deepseek2,
    "ernie4_5": partial(dense.pre_norm, style=PAIR),
    "ernie4_5-moe": partial(dense.pre_norm, style=PAIR),
    "exaone4": partial(dense.post_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "falcon-h1": mamba2.falcon_h1,
    "gemma": partial(dense.pre_norm, style=HALF, activation=_GELU),
    "gemma2": partial(dense.sandwich, style=HALF, activation=_GELU),
    "gemma-embedding": partial(
        dense.sandwich, style=HALF, activation=_GELU, head_norm=HeadNorm.HEADS
    ),
    "gemma3": partial(dense.sandwich, style=HALF, activation=_GELU, head_norm=HeadNorm.HEADS),
    "gemma4": gemma4.gemma4,
    "glm4": partial(dense.sandwich, style=PAIR),
    "glm4moe": partial(dense.pre_norm, **_GLM4MOE),
    "gpt-oss": partial(
        dense.pre_norm,
        style=HALF,
        activation=Activation.CLAMPED,
        mlp_norm="post_attention_norm",
    ),
    "granite": partial(dense.pre_norm, style=PAIR),
    "granitehybrid": mamba2.granite_hybrid,
    "granitemoe": partial(dense.pre_norm, style=PAIR),
    "hunyuan-dense": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.AFTER_ROPE),
    "lfm2": recurrent.lfm2,
    "lfm2moe": recurrent.lfm2,
    "llama": partial(dense.pre_norm, style=PAIR),
    "mistral3": partial(dense.pre_norm, style=PAIR),
    "modern-bert": encoders.modern_bert,
    "nemotron_h": mamba2.nemotron_h,
    "nemotron_h_moe": mamba2.nemotron_h,
    "nomic-bert": partial(encoders.post_norm, is_gated=True, activation=Activation.SILU),
    "nomic-bert-moe": partial(encoders.post_norm, is_gated=False, activation=Activation.GELU_ERF),
    "olmo2": partial(dense.post_norm, style=HALF, head_norm=HeadNorm.WHOLE),
    "phi3": partial(dense.pre_norm, style=HALF),
    "qwen2": partial(dense.pre_norm, style=HALF),
    "qwen2moe": partial(dense.pre_norm, style=HALF),
    "qwen2vl": partial(dense.pre_norm, style=HALF),
    "qwen3": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "qwen3moe": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "qwen35": recurrent.qwen35,
    "qwen35moe": recurrent.qwen35,
    "qwen3next": recurrent.qwen3next,
    "qwen3vl": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "qwen3vlmoe": partial(dense.pre_norm, style=HALF, head_norm=HeadNorm.HEADS),
    "smollm3": partial(dense.pre_norm, style=PAIR),
}

# A layer of architectures whose files may have a block that predicts further tokens.
NEXTN_LAYERS: dict[str, nextn.Layer] = {
    "deepseek2": latent.deepseek2_layer,
    "glm4moe": partial(dense.pre_norm_layer, **_GLM4MOE),
    "qwen35": partial(recurrent.delta_net_layer, is_grouped=False),
    "qwen35moe": partial(recurrent.delta_net_layer, is_grouped=False),
    "qwen3next": partial(recurrent.delta_net_layer, is_grouped=True),
}


def record_plan(
    config: ModelConfig,
    weights: WeightSource,
    max_rows: int,
    *,
    activations: BufferKind = BufferKind.Q8,
    keep: bool = False,
    adapters: Sequence[LowRank] = (),
    n_words: int = 0,
) -> Plan:
    """Records the model; a missing or misshapen tensor raises ModelError naming it.

    keep: buffers share no memory, so that their rows can be read after a step. adapters: whose
    tensors are among the weights. n_words: of the tokens that a ChosenRows among the weights has
    chosen for the logits; 0: they are of all.
    """
    if config.arch not in RECORDERS:
        known = ", ".join(sorted(RECORDERS))
        raise UnsupportedError(f"architecture {config.arch!r} is not supported; supported: {known}")
    builder = PlanBuilder(weights, max_rows, activations, adapters=adapters)
    recording = Recording(builder, config, weights, n_words)
    RECORDERS[config.arch](recording)
    return recording.plan.finish(keep=keep)


def record_nextn(
    config: ModelConfig,
    weights: WeightSource,
    max_rows: int,
    *,
    activations: BufferKind = BufferKind.Q8,
    keep: bool = False,
    n_words: int = 0,
) -> Plan:
    """Records the block behind the last layer that predicts the token after the next; config.nextn
    says that there is one. Options are those of record_plan."""
    blocks = replace(config, layers=config.layers + config.nextn)
    builder = PlanBuilder(weights, max_rows, activations)
    recording = Recording(builder, blocks, weights, n_words)
    nextn.record(recording, config.n_layers, NEXTN_LAYERS[config.arch])
    return builder.finish(keep=keep)


def unused_tensors(plan: Plan, weights: WeightSource, config: ModelConfig) -> list[str]:
    """Names in the file that the recording did not ask for, blocks that predict further tokens left
    aside: whoever wants them records them."""
    behind = tuple(f"blk.{config.n_layers + n}." for n in range(len(config.nextn)))
    used = {stored_name(tensor.name) for tensor in plan.tensors} | set(DIVISOR_TENSORS)
    return [
        name
        for name in weights.names()
        if name not in used and not is_factor(name) and not name.startswith(behind)
    ]
