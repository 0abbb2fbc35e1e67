"""Many rows at once skip the positions that none of them sees, and read keys and values that were
made floats once; a row alone reads the cache as it lies. The bits are the same."""

from __future__ import annotations

import numpy as np
import pytest
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.ops import KvType

from .native_library import ISAS
from .tiny import TinyDims, run_tokens, tiny_model

VOCAB_SIZE = 40
TOKENS = np.random.default_rng(7).integers(0, VOCAB_SIZE, 330).tolist()  # into a second split


def logits(head_dim: int, kv_type: KvType, isa: str, *, chunk: int, n_threads: int) -> np.ndarray:
    """Two layers, one of which sees a window that starts and ends within groups of 16."""
    dims = TinyDims(
        64, 64, heads=6, kv_heads=2, head_dim=head_dim, vocab_size=VOCAB_SIZE, window=75
    )
    model = tiny_model("gemma3", formats=("F32",), dims=dims)
    executor = NativeExecutor(
        model.plan(len(TOKENS)),
        model.weights,
        n_blocks=11,
        kv_type=kv_type,
        isa=isa,
        n_threads=n_threads,
    )
    try:
        return run_tokens(executor, TOKENS, chunk=chunk)
    finally:
        executor.close()


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("head_dim", [48, 64, 112])  # whole tiles of a block, and parts of one
def test_a_row_among_many_equals_the_row_alone(head_dim: int, kv_type: KvType) -> None:
    alone = logits(head_dim, kv_type, ISAS[-1], chunk=1, n_threads=1)
    for isa in ISAS:
        for chunk, n_threads in ((0, 1), (37, 2)):  # items of 96 query vectors, and of 24
            many = logits(head_dim, kv_type, isa, chunk=chunk, n_threads=n_threads)
            np.testing.assert_array_equal(many, alone, err_msg=f"{isa}, {chunk} rows at once")
