"""Logits of tiny random models against what `transformers` computed for them in float32.

The recordings come from scripts/record_oracle.py; nothing here needs torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import MartletError
from martlet.runtime.executors.choice import EXECUTORS, create_executor, executor_class
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.weights import StoredTensor, StoredWeights
from martlet.scripts.record_oracle import MODELS, gguf_metadata, gguf_tensors

from .tiny import run_tokens

RELATIVE_ERROR = 1e-4  # max |a - b| / max |b|
F16_CACHE_ERROR = 5e-3  # keys and values rounded to float16 as well

DATA = Path(__file__).parents[1] / "data" / "oracle"
STORIES = Path(__file__).parents[2].parent / "shared" / "data" / "stories260k-hf"


def relative_error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def recorded(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(DATA / f"{name}.npz") as data:
        return data["ids"].tolist(), data["logits"]


def run_model(
    metadata: dict[str, Any],
    weights: StoredWeights,
    ids: list[int],
    *,
    executor: str = "reference",
    kv_type: KvType = KvType.F32,
) -> np.ndarray:
    shapes = {name: weights.shape(name) or () for name in weights.names()}
    plan = record_plan(ModelConfig.from_metadata(metadata, shapes), weights, max_rows=64)
    runner, _ = create_executor(executor, plan, weights, n_blocks=4, kv_type=kv_type)
    try:
        return run_tokens(runner, ids)
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


@pytest.mark.parametrize("name", MODELS)
def test_every_executor_equals_transformers(name: str, executor: str) -> None:
    ids, expected = recorded(name)
    with GGUFFile.open(DATA / f"{name}.gguf") as file:
        weights = StoredWeights(file.tensors)
        logits = run_model(file.metadata, weights, ids, executor=executor)
        assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_float16_cache_costs_little(name: str, executor: str) -> None:
    ids, expected = recorded(name)
    with GGUFFile.open(DATA / f"{name}.gguf") as file:
        weights = StoredWeights(file.tensors)
        logits = run_model(file.metadata, weights, ids, executor=executor, kv_type=KvType.F16)
        assert RELATIVE_ERROR < relative_error(logits, expected) < F16_CACHE_ERROR


def test_stories260k_equals_transformers(executor: str) -> None:
    if not STORIES.exists():
        pytest.skip("no ../shared/data/stories260k-hf beside the checkout")
    from safetensors.numpy import load_file

    config = json.loads((STORIES / "config.json").read_text())
    tensors = gguf_tensors(load_file(STORIES / "model.safetensors"), config, "llama")
    weights = StoredWeights({n: StoredTensor.from_floats(v) for n, v in tensors.items()})
    ids, expected = recorded("stories260k")
    logits = run_model(gguf_metadata(config, "llama"), weights, ids, executor=executor)
    assert relative_error(logits, expected) < RELATIVE_ERROR
