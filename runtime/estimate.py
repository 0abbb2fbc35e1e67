"""What serving a model takes in memory, computed before anything is loaded.

Owns: the sizes of csrc's packed weights, KV blocks, arena and scratch as formulas over a plan, and
the longest context that fits. Must not know: files, threads' work, how sizes are shown.

The formulas follow csrc/formats.h (weights) and csrc/engine.c (the rest); a test holds them against
what the native executor says it has allocated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from .ops import KvType, OpKind
from .plan import Op, Plan, PlanTensor
from .state_slots import SPARE_STATES
from .step import MOST_GUESSES
from .weights import stored_name
from .window_parts import parts_of_pool

TILE_ROWS = 32
ALIGNMENT = 64
SPLIT_TOKENS = 256  # positions of one attention split
SPLIT_ROWS = 16  # rows of a step up to which attention is split over positions
SUM_BYTES = 256 << 10
GATHERED_ROWS = 126  # of one expert at a time
THREAD_BYTES = 192 << 10  # working space of a thread beside one row of the widest buffer: about


class Packing(NamedTuple):
    """Bytes of a packed block of 32 rows x 32 columns, and of a header per 8 such blocks."""

    block_bytes: int
    header_bytes: int = 0


# codes + scales (+ minima); the 16-bit scales of a format of super-blocks stand in its header
PACKINGS = {
    "Q4_0": Packing(512 + 64),
    "Q4_1": Packing(512 + 128),
    "Q5_0": Packing(640 + 64),
    "Q5_1": Packing(640 + 128),
    "Q8_0": Packing(1024 + 64),
    "IQ4_NL": Packing(512 + 64),
    "IQ4_XS": Packing(512 + 32, 64),
    "Q2_K": Packing(256 + 128, 128),
    "Q3_K": Packing(384 + 64, 64),
    "Q4_K": Packing(512 + 64, 128),
    "Q5_K": Packing(640 + 64, 128),
    "Q6_K": Packing(768 + 64, 64),
    "MXFP4": Packing(512 + 32),
    "TQ1_0": Packing(256, 64),
    "TQ2_0": Packing(256, 64),
    "IQ1_S": Packing(384 + 32, 64),
    "IQ1_M": Packing(384 + 64, 64),
    "IQ2_XXS": Packing(384 + 32, 64),
    "IQ2_XS": Packing(384 + 64, 64),
    "IQ2_S": Packing(384 + 64, 64),
    "IQ3_XXS": Packing(512 + 32, 64),
    "IQ3_S": Packing(512 + 32, 64),
}
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. `kv_lower` is what the keys and values of all sequences need if every layer kept only
    what its attention can still see; `kv_pool` is what the block pool allocates for them."""

    context: int
    sequences: int
    attention: str
    weights_mapped: int
    weights_packed: int
    weights_raw: int
    """What is held without a packed copy: vectors. Matrices are read in the file."""
    weights_late: int
    """Of them, of experts: with mmap_experts none of it before a row chooses them."""
    kv_lower: int
    kv_pool: int
    states: int
    """Of recurrent layers: one for each sequence, and some for the ends of known prefixes."""
    guesses: int
    """What such layers need, beside each state, to take back guessed tokens."""
    nextn: int
    """The model's own block that guesses, with its keys and values and its arena."""
    arena: int
    process: int
    """This process with the vocabulary read, before the rest: interpreter, libraries, tokenizer."""
    available: int
    largest_context: int
    """Per sequence, for this many sequences; at most what the model was trained for."""

    @property
    def total(self) -> int:
        """Resident at most. Mapped weights are given back once they are packed."""
        return (
            self.weights_packed
            + self.kv_pool
            + self.states
            + self.guesses
            + self.nextn
            + self.arena
            + self.process
        )

    @property
    def fits(self) -> bool:
        """With a packed copy of the weights."""
        return self.total - self.process <= self.available

    @property
    def fits_from_file(self) -> bool:
        """Without one, as loading chooses by itself where there is no room for it."""
        spared = self.weights_packed - self.weights_raw
        return self.total - self.process - spared <= self.available


def estimate(
    plan: Plan,
    *,
    context: int,
    context_train: int,
    sequences: int,
    block_tokens: int,
    kv_type: KvType,
    n_threads: int,
    weights_mapped: int,
    process: int,
    available: int,
    n_guesses: int = MOST_GUESSES,
    nextn: Plan | None = None,
) -> MemoryEstimate:
    """nextn: of the model's own block that guesses."""
    packed = weight_bytes(plan)
    n_states = sequences + SPARE_STATES
    states, guesses = n_states * plan.state_bytes, n_states * n_guesses * plan.guess_bytes

    full, windowed = kv_block_bytes(plan, block_tokens, kv_type)

    def pool_bytes(per_context: int) -> int:
        n_blocks = sequences * per_context
        n_parts = parts_of_pool(n_blocks, per_context, plan.window, block_tokens, plan.max_rows)
        return n_blocks * full + n_parts * windowed

    def nextn_bytes(per_context: int) -> int:
        if nextn is None:
            return 0
        n_blocks = sequences * per_context
        pool = n_blocks * sum(kv_block_bytes(nextn, block_tokens, kv_type))
        return weight_bytes(nextn) + pool + arena_bytes(nextn, n_blocks * block_tokens, n_threads)

    def needed(blocks_per_context: int) -> int:
        n_tokens = sequences * blocks_per_context * block_tokens
        held = packed + states + guesses + arena_bytes(plan, n_tokens, n_threads)
        return held + pool_bytes(blocks_per_context) + nextn_bytes(blocks_per_context)

    n_blocks = -(-context // block_tokens)
    most_blocks = bisect_right(range(available // max(full, 1) + 2), available, key=needed) - 1
    return MemoryEstimate(
        context=context,
        sequences=sequences,
        attention=attention_kind(plan),
        weights_mapped=weights_mapped,
        weights_packed=packed,
        weights_raw=weight_bytes(plan, repack=False),
        weights_late=late_bytes(plan),
        kv_lower=sequences * kv_lower_bytes(plan, context, kv_type),
        kv_pool=pool_bytes(n_blocks),
        states=states,
        guesses=guesses,
        nextn=nextn_bytes(n_blocks),
        arena=arena_bytes(plan, sequences * n_blocks * block_tokens, n_threads),
        process=process,
        available=available,
        largest_context=min(context_train, max(0, most_blocks) * block_tokens),
    )


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def weight_bytes(plan: Plan, repack: bool = True) -> int:
    """repack: matrices are packed; else they stay in the file."""
    stay = set() if repack else matrices(plan)
    held = (t for at, t in enumerate(plan.tensors) if not t.stays and at not in stay)
    return sum(aligned(_tensor_bytes(tensor)) for tensor in held)


def matrices(plan: Plan) -> set[int]:
    """Those that products can read in the file, by place among the tensors: not those made of some
    rows of what is there."""
    return {
        at
        for at, tensor in enumerate(plan.tensors)
        if tensor.values is None
        and len(tensor.shape) > 1
        and stored_name(tensor.name) == tensor.name
    }


def late_bytes(plan: Plan) -> int:
    """Of weights that can be packed when they are first used."""
    return sum(aligned(_tensor_bytes(plan.tensors[at])) for at in plan.experts_alone())


def _tensor_bytes(tensor: PlanTensor) -> int:
    """Tables are float64 and vectors float32; matrices are packed in tiles of 32 rows."""
    if tensor.values is not None:
        return 8 * tensor.values.size
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    rows, cols = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    n_tiles = -(-rows // TILE_ROWS)
    if tensor.format in FLOAT_BYTES:
        return n_tiles * TILE_ROWS * cols * FLOAT_BYTES[tensor.format]
    packing = PACKINGS[tensor.format]
    n_headers = cols // 256 if packing.header_bytes else 0
    return n_tiles * (cols // 32 * packing.block_bytes + n_headers * packing.header_bytes)


def kv_block_bytes(plan: Plan, block_tokens: int, kv_type: KvType) -> tuple[int, int]:
    """Of a block in layers that see all positions, and in those with a window. Values are padded
    to 16 per head, each head to a cache line."""
    groups = [0, 0]
    for layer, window in zip(plan.kv_layers, plan.kv_windows(), strict=True):
        values = kv_type.head_bytes(-(-layer.v_dim // 16) * 16)
        n_bytes = aligned(block_tokens * (kv_type.head_bytes(layer.head_dim) + values))
        groups[window > 0] += layer.kv_heads * n_bytes
    return groups[0], groups[1]


def kv_lower_bytes(plan: Plan, context: int, kv_type: KvType) -> int:
    """One sequence: heads x (key + value) x the positions each layer's attention can see."""
    return sum(
        layer.kv_heads * layer.head_bytes(kv_type) * (min(context, window) if window else context)
        for layer, window in zip(plan.kv_layers, plan.kv_windows(), strict=True)
    )


def arena_bytes(plan: Plan, pool_tokens: int, n_threads: int, repack: bool = True) -> int:
    widest = max((buffer.width for buffer in plan.buffers), default=0)
    per_thread = THREAD_BYTES + 4 * widest + gathered_bytes(plan) + file_tile_bytes(plan, repack)
    return aligned(plan.arena_bytes) + split_bytes(plan, pool_tokens) + n_threads * per_thread


def file_tile_bytes(plan: Plan, repack: bool = True) -> int:
    """A packed tile of the widest matrix or table that stays in the file."""
    stay = [t for t in plan.tensors if t.stays]
    stay += [] if repack else [plan.tensors[at] for at in matrices(plan)]
    return max((_tensor_bytes(replace(t, shape=(1, t.shape[-1]))) for t in stay), default=0)


def gathered_bytes(plan: Plan) -> int:
    """Rows of one expert, copied to lie behind each other, in two planes; and sums of experts."""
    inputs = (plan.buffers[op.inputs[0]] for op in plan.ops if op.kind is OpKind.EXPERT_GLU)
    rows = 2 * min(plan.max_rows, GATHERED_ROWS) * max((b.row_bytes for b in inputs), default=0)
    return rows + SUM_BYTES if rows else 0


def split_bytes(plan: Plan, pool_tokens: int) -> int:
    """Partial results of attention over a sequence as long as the pool, for few rows at a time."""
    heads = max((op.int_of("heads") for op in _attention_ops(plan)), default=0)
    rows = min(plan.max_rows, SPLIT_ROWS)
    return rows * heads * (_value_stride(plan) + 2) * 4 * -(-pool_tokens // SPLIT_TOKENS)


def _value_stride(plan: Plan) -> int:
    return max((-(-layer.value_dim // 16) * 16 for layer in plan.kv_layers), default=0)


def attention_kind(plan: Plan) -> str:
    """As `GQA 3:1`, with layers counted where they differ."""
    kinds: Counter[str] = Counter()
    for op in _attention_ops(plan):
        heads, kv_heads, window = (op.int_of(n) for n in ("heads", "kv_heads", "window"))
        kind = "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
        kind = "MLA" if plan.kv_layers[op.int_of("kv_layer")].is_latent else kind
        kinds[f"{kind} {heads // kv_heads}:1" + (f" window {window}" if window else "")] += 1
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common())


def _attention_ops(plan: Plan) -> list[Op]:
    return [op for op in plan.ops if op.kind is OpKind.ATTENTION]
