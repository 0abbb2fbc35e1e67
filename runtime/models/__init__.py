"""From an architecture's name to the function that records it.

A new architecture is one file here, one line in RECORDERS and one row in config.ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import ModelConfig
from ..errors import UnsupportedError
from ..ops import BufferKind
from ..plan import Plan
from ..plan_builder import PlanBuilder
from ..weights import WeightSource
from . import gemma, llama, qwen
from .blocks import ROPE_DIVISORS, Recording

RECORDERS: dict[str, Callable[[Recording], None]] = {
    "gemma3": gemma.record,
    "llama": llama.record,
    "qwen2": qwen.record,
    "qwen2moe": qwen.record,
    "qwen3": qwen.record,
    "qwen3moe": qwen.record,
}


def record_plan(
    config: ModelConfig,
    weights: WeightSource,
    max_rows: int,
    *,
    activations: BufferKind = BufferKind.Q8,
    keep: bool = False,
) -> Plan:
    """Records the model; a missing or misshapen tensor raises ModelError naming it.

    keep: buffers share no memory, so that their rows can be read after a step.
    """
    if config.arch not in RECORDERS:
        known = ", ".join(sorted(RECORDERS))
        raise UnsupportedError(f"architecture {config.arch!r} is not supported; supported: {known}")
    recording = Recording(PlanBuilder(weights, max_rows, activations), config, weights)
    RECORDERS[config.arch](recording)
    return recording.plan.finish(keep=keep)


def unused_tensors(plan: Plan, weights: WeightSource) -> list[str]:
    """Names in the file that the recording did not ask for."""
    used = {tensor.name for tensor in plan.tensors} | {ROPE_DIVISORS}
    return [name for name in weights.names() if name not in used]
