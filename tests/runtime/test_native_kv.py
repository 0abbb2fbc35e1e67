"""The narrow caches against the float32 one, for every head size (B102), and blocks that leave the
pool and come back."""

from __future__ import annotations

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.ops import KvType

from .native_library import ISAS
from .tiny import Chunk, TinyDims, make_step, run_tokens, tiny_model

VOCAB_SIZE = 40
TOKENS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 200).tolist()
# max |a - b| / max |b| over all logits of 200 positions, against keys and values in float32
MOST_ERROR = {KvType.F16: 5e-4, KvType.Q8_0: 1e-2}


def new_executor(head_dim: int, kv_type: KvType, isa: str) -> NativeExecutor:
    """Float weights, so that nothing but the cache rounds."""
    dims = TinyDims(64, 64, heads=2, kv_heads=1, head_dim=head_dim, vocab_size=VOCAB_SIZE)
    model = tiny_model("qwen3", formats=("F32",), dims=dims)
    return NativeExecutor(
        model.plan(64), model.weights, n_blocks=8, kv_type=kv_type, isa=isa, n_threads=2
    )


def logits(head_dim: int, kv_type: KvType, isa: str, chunk: int = 0) -> np.ndarray:
    executor = new_executor(head_dim, kv_type, isa)
    try:
        return run_tokens(executor, TOKENS, chunk=chunk)
    finally:
        executor.close()


@pytest.mark.parametrize("kv_type", MOST_ERROR)
@pytest.mark.parametrize("head_dim", [24, 32, 48, 64, 80, 128])
def test_a_narrow_cache_costs_little(head_dim: int, kv_type: KvType) -> None:
    exact = logits(head_dim, KvType.F32, ISAS[-1])
    narrow = logits(head_dim, kv_type, ISAS[-1])
    error = np.abs(narrow - exact).max() / np.abs(exact).max()
    assert 0 < error < MOST_ERROR[kv_type]
    for isa in ISAS:
        np.testing.assert_array_equal(logits(head_dim, kv_type, isa), narrow, err_msg=isa)
    np.testing.assert_array_equal(logits(head_dim, kv_type, ISAS[-1], chunk=1), narrow)


@pytest.mark.parametrize("kv_type", KvType)
def test_a_block_comes_back_as_it_left(kv_type: KvType) -> None:
    executor = new_executor(48, kv_type, ISAS[-1])
    try:
        expected = run_tokens(executor, TOKENS[:40], blocks=[2, 5])
        kept = executor.read_block(2)
        run_tokens(executor, [7] * 32, blocks=[2])
        executor.write_block(6, kept)
        again = executor.run(make_step([Chunk(TOKENS[32:40], 32, [6, 5])]))
        np.testing.assert_array_equal(again, expected[32:])
        for call in (lambda: executor.read_block(8), lambda: executor.write_block(-1, kept)):
            with pytest.raises(ModelError, match="the pool has 8"):
                call()
        with pytest.raises(ModelError, match="bytes"):
            executor.write_block(0, kept[:-1])
    finally:
        executor.close()
