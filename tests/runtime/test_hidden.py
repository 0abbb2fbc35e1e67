"""Hidden states: what the output projection is made from, for rows that ask for no logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors import Executor
from martlet.runtime.executors.choice import create_executor, executor_class
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .tiny import Chunk, TinyDims, TinyModel, make_step, run_tokens, tiny_model

DIMS = TinyDims(dim=64, ffn_dim=128, heads=4, kv_heads=2, head_dim=16, vocab_size=90)
TOKENS = [(7 * i) % 90 for i in range(40)]
NAMES = ("reference", "numba", "native")


def executor_of(name: str, model: TinyModel) -> Executor:
    try:
        executor_class(name)
    except (ImportError, OSError, ModelError) as error:
        pytest.skip(f"{name} is not available: {error}")
    options: dict[str, Any] = {"n_blocks": 8, "block_tokens": 16}
    return create_executor(name, model.plan(48), model.weights, **options)[0]


def run(executor: Executor, chunks: Sequence[Chunk], hidden_rows: Sequence[int]) -> np.ndarray:
    step = make_step(chunks, out_rows=[0])
    executor.run(replace(step, hidden_rows=np.array(hidden_rows, np.int32)))
    return executor.hidden


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("name", NAMES)
def test_projected_they_are_the_logits(name: str, arch: str) -> None:
    model = tiny_model(arch, formats=("Q8_0",), dims=DIMS)
    executor = executor_of(name, model)
    hidden = run(executor, [Chunk(TOKENS, 0, [0, 1, 2])], range(40))
    assert (hidden.shape, hidden.dtype) == ((40, 64), np.float32)
    logits = run_tokens(executor, TOKENS)
    projected = hidden @ model.weights.dequantized("token_embd.weight").T
    assert np.abs(projected - logits).max() < 2e-3 * np.abs(logits).max()
    assert executor.hidden.shape == (0, 64), "nobody asked in the last step"


@pytest.mark.parametrize("name", NAMES)
def test_alone_as_in_any_company_to_the_bit(name: str) -> None:
    executor = executor_of(name, tiny_model("gemma3", formats=("Q4_0", "Q8_0"), dims=DIMS))
    alone = run(executor, [Chunk(TOKENS, 0, [0, 1, 2])], range(40))
    parts = []
    for at in range(0, 40, 9):
        chunk = Chunk(TOKENS[at : at + 9], at, [3, 4, 5])
        other = Chunk(TOKENS[:5], 0, [6])
        n = len(chunk.tokens)
        parts.append(run(executor, [other, chunk], range(5, 5 + n)))
    assert np.concatenate(parts).tobytes() == alone.tobytes()
    few = run(executor, [Chunk(TOKENS, 0, [0, 1, 2])], [3, 39])
    assert few.tobytes() == alone[[3, 39]].tobytes()


def test_executors_agree() -> None:
    model = tiny_model("llama", formats=("F32",), dims=DIMS)
    found = [
        run(executor_of(name, model), [Chunk(TOKENS, 0, [0, 1, 2])], [0, 20, 39]) for name in NAMES
    ]
    for other in found[1:]:
        assert np.allclose(found[0], other, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_plans_without_hidden_states_run_as_before(name: str) -> None:
    table = StoredTensor.from_floats(np.eye(32, dtype=np.float32))
    weights = StoredWeights({"t": table})
    plan = PlanBuilder(weights, 8)
    at = plan.weight("t", 32, 32)
    plan.linear(plan.take_rows(plan.embed(at)), [at], name="logits", logits=True)
    finished = plan.finish()
    assert (finished.hidden, finished.hidden_width) == (-1, 0)
    executor_of(name, tiny_model(dims=DIMS)).close()
    executor, _ = create_executor(name, finished, weights, n_blocks=1, block_tokens=16)
    assert run_tokens(executor, [3])[0].argmax() == 3
    assert executor.hidden.shape == (0, 0)
