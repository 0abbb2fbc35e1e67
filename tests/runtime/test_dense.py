"""Trial runs: what the reference computes, resumed from any op, with one weight changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from martlet.runtime.dense import DenseRunner
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.weights import StoredTensor, StoredWeights

from .tiny import Chunk, TinyDims, TinyModel, make_step, tiny_model

DIMS = TinyDims(dim=64, ffn_dim=96, heads=4, kv_heads=2, head_dim=16, vocab_size=90, window=7)
SEQUENCES = [[(7 * i) % 90 for i in range(40)], [(11 * i) % 90 for i in range(25)]]


def expected(model: TinyModel) -> np.ndarray:
    plan = record_plan(model.config, model.weights, 80, activations=BufferKind.F32)
    executor = ReferenceExecutor(plan, model.weights, n_blocks=4, kv_type=KvType.F32)
    chunks = [Chunk(SEQUENCES[0], 0, [0, 1]), Chunk(SEQUENCES[1], 0, [2, 3])]
    executor.run(replace(make_step(chunks, []), hidden_rows=np.arange(65, dtype=np.int32)))
    return executor.hidden


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2", "qwen3"])
def test_hidden_states_are_those_of_the_reference(arch: str) -> None:
    model = tiny_model(arch, formats=("Q8_0",), dims=DIMS)
    dense = DenseRunner(model.config, model.weights, SEQUENCES)
    run = dense.begin()
    dense.advance(run, 0)
    found, wanted = run.hidden(), expected(model)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_branch_with_another_weight_is_a_run_of_the_other_model() -> None:
    model = tiny_model("gemma3", formats=("Q8_0",), dims=DIMS)
    name = "blk.1.ffn_gate.weight"
    changed = model.weights.dequantized(name) * np.float32(1.3)
    tensors = {
        n: StoredTensor.from_floats(changed if n == name else model.weights.dequantized(n))
        for n in model.weights.names()
    }
    other = TinyModel(model.config, StoredWeights(tensors))

    dense = DenseRunner(model.config, model.weights, SEQUENCES)
    (at,) = dense.ops_with(name)
    run = dense.begin()
    dense.advance(run, 0, at)
    branch = dense.branch(run, at)
    dense.changed(name, changed).advance(branch, at)
    dense.advance(run, at)
    for found, wanted in ((branch.hidden(), expected(other)), (run.hidden(), expected(model))):
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(branch.hidden() - run.hidden()).max() > 1e-2
