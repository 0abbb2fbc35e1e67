"""Binds products in which every head has a matrix of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ops import q8_row_bytes
from ..plan import Op
from .numba_experts import ExpertMatrix
from .numba_math import Q8_D, Q8_DH, Q8_DS, Q8_H, Q8_S, Q8Views
from .numba_memory import NO_FLOATS, NO_Q8, Call, Rows
from .numba_weights import BLOCK

if TYPE_CHECKING:
    from .numba_bind import Binder

_WORDS = ((0, BLOCK // 4), (Q8_D, 1), (Q8_S, 1), (Q8_DS, 1), (Q8_H, 2), (Q8_DH, 2))
"""Parts of a quantized row: words per block before it, and in it."""


def bind_head_linear(b: Binder, op: Op) -> list[Call]:
    x, rest, kept = op.inputs
    tensor, heads = b.plan.tensors[op.weight_of("weight")], op.int_of("heads")
    _, n_rows, cols = tensor.shape
    matrices = ExpertMatrix.of(b.pack((tensor.name,)), np.empty(0, np.float32), heads)
    width, out, kind = b.plan.buffers[x].width // heads, b.floats(op.out), b.rows_of(op)
    floats, q8, rest_q8, tails = b.floats(x), b.q8(x), b.q8(rest), b.floats(kept)
    stride = n_rows + width - cols

    def head_linear(rows: Rows) -> None:
        n = rows.counts[kind]
        for h in range(heads):
            first, to = h * width, h * stride
            inputs = (
                np.ascontiguousarray(floats[:n, first : first + cols])
                if floats.size
                else NO_FLOATS,
                _part(q8, n, heads * width, first, cols),
                _part(rest_q8, n, heads * width, first, cols),
            )
            matrices.multiply(h, *inputs, out[:n], to)
            if tails.size:
                out[:n, to + n_rows : to + stride] = tails[:n, first + cols : first + width]

    return [head_linear]


def _part(q8: Q8Views, n: int, width: int, first: int, cols: int) -> Q8Views:
    """Values first … first + cols - 1 of n rows of so many, as rows of their own."""
    if not q8.codes.size:
        return NO_Q8
    n_all, at, n_blocks = width // BLOCK, first // BLOCK, cols // BLOCK
    words = np.zeros((n, q8_row_bytes(cols) // 4), np.int32)
    for before, per_block in _WORDS:
        start, end = before * n_all + per_block * at, per_block * n_blocks
        words[:, before * n_blocks : before * n_blocks + end] = q8.words[:n, start : start + end]
    return Q8Views(words.view(np.int8), words, words.view(np.float32))
