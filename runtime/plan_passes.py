"""What happens to a recording once it is complete: folding of ops, places of buffers in the arena.

Owns: which neighbours become one op, and offsets from first and last use. Must not know: models,
weights' values or executors. Called by PlanBuilder.finish.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from .ops import Q8_BLOCK, OpKind

if TYPE_CHECKING:  # the recording's records are plan.py's
    from .plan import Buffer, Op, PlanTensor

ALIGN_BYTES = 64  # one cache line, one 512-bit vector


def fold_glu(ops: list[Op], tensors: list[PlanTensor]) -> None:
    """Lets the product of gate and up, or of one alone, go through the activation tile by tile: the
    floats between them never reach memory."""
    readers = Counter(b for op in ops for b in op.inputs if b >= 0)
    writers = Counter(op.out for op in ops)
    linear: dict[int, Op] = {op.out: op for op in ops if op.kind is OpKind.LINEAR}
    kept: list[Op] = []
    for op in ops:
        gate_up = linear.get(op.inputs[0]) if op.kind is OpKind.GLU else None
        if gate_up and readers[gate_up.out] == writers[gate_up.out] == 1:
            gate, up, third = gate_up.weights[:3]
            is_pair = third < 0 <= up and tensors[gate].shape == tensors[up].shape
            fits = up < 0 if op.int_of("alone") else is_pair
            if fits:
                kept.remove(gate_up)
                weights = (gate, up, *gate_up.weights[3:5])
                op = replace(op, kind=OpKind.LINEAR_GLU, inputs=gate_up.inputs, weights=weights)
                op.ints = op.ints[:1]
        kept.append(op)
    ops[:] = kept


def _writes_whole_blocks(op: Op) -> bool:
    """Whether one work item of the op produces whole activation blocks, so it can quantize them."""
    producers = (
        *(OpKind.NORM, OpKind.ATTENTION, OpKind.GLU, OpKind.LINEAR_GLU),
        *(OpKind.GATE, OpKind.EXPERT_GLU),
    )
    if op.accumulate or op.kind not in producers:
        return False
    return op.kind is not OpKind.ATTENTION or op.int_of("value_dim") % Q8_BLOCK == 0


def fold_quantize(ops: list[Op]) -> None:
    """Lets the producer of a row write it quantized where nobody needs the floats."""
    readers = [b for op in ops for b in op.inputs if b >= 0]
    producers = {op.out: op for op in ops}
    kept = []
    for op in ops:
        source = op.inputs[0] if op.kind is OpKind.QUANTIZE else -1
        producer = producers.get(source)
        if producer and readers.count(source) == 1 and _writes_whole_blocks(producer):
            producer.out, producer.out_rest = op.out, op.out_rest
        else:
            kept.append(op)
    ops[:] = kept


def place_buffers(ops: list[Op], buffers: list[Buffer], max_rows: int, keep: bool = False) -> int:
    """Gives every buffer an offset so that buffers alive at the same time never overlap.

    First fit, largest first within the order of birth; returns the arena's bytes. keep: all live
    until the step has ended, so that their rows can be read then.
    """

    def arena_bytes_of(buffer: Buffer) -> int:
        n_bytes = buffer.row_bytes * max_rows * buffer.per_row
        return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES

    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, op in enumerate(ops):
        for b in (*op.outs, *op.inputs):
            if b >= 0:
                first.setdefault(b, at)
                last[b] = len(ops) if keep else at
    placed: list[int] = []
    arena_bytes = 0
    for b in sorted(first, key=lambda b: (first[b], -buffers[b].row_bytes)):
        if buffers[b].is_logits:
            continue
        n_bytes = arena_bytes_of(buffers[b])
        alive = [o for o in placed if first[o] <= last[b] and first[b] <= last[o]]
        offset = 0
        for o in sorted(alive, key=lambda o: buffers[o].offset):
            if offset + n_bytes <= buffers[o].offset:
                break
            offset = max(offset, buffers[o].offset + arena_bytes_of(buffers[o]))
        buffers[b].offset = offset
        placed.append(b)
        arena_bytes = max(arena_bytes, offset + n_bytes)
    return arena_bytes
