"""Logits of converted checkpoints against what `transformers` computed for them in float32.

The recordings come from scripts/record_checkpoints.py; nothing here needs torch.
"""

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import MartletError
from martlet.runtime.executors.choice import EXECUTORS, create_executor, executor_class
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredWeights

from ..recorded import RELATIVE_ERROR, STORED, TINY, error_of, gguf_of, recorded_ids
from .tiny import run_tokens

F16_CACHE_ERROR = 5e-3  # keys and values rounded to float16 as well


def logits_of(name: str, executor: str, kv_type: KvType = KvType.F32) -> np.ndarray:
    with GGUFFile.open(gguf_of(name)) as file:
        weights = StoredWeights(file.tensors)
        shapes = {tensor: weights.shape(tensor) or () for tensor in weights.names()}
        config = ModelConfig.from_metadata(file.metadata, shapes)
        plan = record_plan(config, weights, max_rows=64)
        runner, _ = create_executor(executor, plan, weights, n_blocks=4, kv_type=kv_type)
        try:
            return run_tokens(runner, recorded_ids(name))
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
    assert error_of(name, logits_of(name, executor)) < RELATIVE_ERROR


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_float16_cache_costs_little(name: str, executor: str) -> None:
    error = error_of(name, logits_of(name, executor, KvType.F16))
    assert RELATIVE_ERROR < error < F16_CACHE_ERROR
