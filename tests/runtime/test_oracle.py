"""Logits of converted checkpoints against what `transformers` computed for them in float32.

The recordings come from scripts/record_checkpoints.py; nothing here needs torch.
"""

import numpy as np
import pytest
from martlet.runtime.errors import MartletError
from martlet.runtime.executors.choice import EXECUTORS, create_executor, executor_class
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType

from ..recorded import RELATIVE_ERROR, STORED, TINY, error_of, recorded_ids, recorded_model
from .tiny import run_tokens

F16_CACHE_ERROR = 5e-3  # keys and values rounded to float16 as well


def logits_of(name: str, executor: str, kv_type: KvType = KvType.F32) -> list[np.ndarray]:
    """Prefilled whole, in chunks of 7, and one by one."""
    config, weights = recorded_model(name)
    ids = recorded_ids(name)
    plan = record_plan(config.at_context(len(ids)), weights, max_rows=64)
    runner, _ = create_executor(executor, plan, weights, n_blocks=4, kv_type=kv_type)
    try:
        return [run_tokens(runner, ids, chunk=chunk) for chunk in (64, 7, 1)]
    finally:
        runner.close()


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        executor_class(name)
    except (ImportError, OSError, MartletError) as error:
        pytest.skip(f"{name} is not available: {error}")
    return name


@pytest.mark.parametrize("name", [*TINY, *STORED])
def test_every_executor_equals_transformers(name: str, executor: str) -> None:
    whole, in_chunks, one_by_one = logits_of(name, executor)
    assert error_of(name, whole) < RELATIVE_ERROR
    np.testing.assert_array_equal(in_chunks, whole)
    np.testing.assert_array_equal(one_by_one, whole)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek2"])
def test_a_float16_cache_costs_little(name: str, executor: str) -> None:
    error = error_of(name, logits_of(name, executor, KvType.F16)[0])
    assert RELATIVE_ERROR < error < F16_CACHE_ERROR
