"""The block that predicts further tokens, against its formulas, on every executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import ModelError
from martlet.runtime.executors import Executor
from martlet.runtime.executors.choice import create_executor, executor_class
from martlet.runtime.models import record_nextn
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredWeights

from .. import nextn
from ..recorded import RELATIVE_ERROR, relative_error
from .tiny import Chunk, make_step

EXECUTORS = ("reference", "numba", "native")
N_ROWS = 12


def config_of(name: str) -> tuple[ModelConfig, StoredWeights]:
    file = GGUFFile.open(nextn.gguf_of(name))
    shapes = {key: tensor.shape for key, tensor in file.tensors.items()}
    return ModelConfig.from_metadata(file.metadata, shapes), StoredWeights(file.tensors)


def executor_of(executor: str, name: str) -> Executor:
    try:
        executor_class(executor)
    except (ImportError, OSError, ModelError) as error:
        pytest.skip(f"{executor} is not available: {error}")
    config, weights = config_of(name)
    plan = record_nextn(config, weights, 16, activations=activations_of(executor))
    assert plan.given_width == config.dim
    options: dict[str, Any] = {"n_blocks": 4, "block_tokens": 16, "kv_type": KvType.F32}
    return create_executor(executor, plan, weights, **options)[0]


def activations_of(executor: str) -> BufferKind:
    """Weights in F32 meet floats in any case; numba knows no other kind."""
    return BufferKind.Q8 if executor == "numba" else BufferKind.F32


def rows_of(chunk: Chunk, hidden: np.ndarray) -> Step:
    step = make_step([chunk])
    given = np.ascontiguousarray(hidden, np.float32)
    return replace(step, given=given, hidden_rows=np.arange(step.n_rows, dtype=np.int32))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", nextn.NAMES)
def test_it_computes_what_the_formulas_say(name: str, executor: str) -> None:
    """In one step, and in two with what the first leaves in the cache."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 305, N_ROWS)
    hidden = rng.standard_normal((N_ROWS, 32))
    logits, behind = nextn.Reference(name).run(tokens, hidden)
    block = executor_of(executor, name)
    for parts in ([slice(0, 12)], [slice(0, 7), slice(7, 12)]):
        for rows in parts:
            step = rows_of(Chunk(tokens[rows].tolist(), rows.start, [2]), hidden[rows])
            assert relative_error(block.run(step), logits[rows]) < RELATIVE_ERROR
            assert relative_error(block.hidden, behind[rows]) < RELATIVE_ERROR
    block.close()


def test_files_that_left_the_block_out_have_none() -> None:
    config, _ = config_of("glm4moe")
    assert len(config.nextn) == 1
    assert config.nextn[0].experts == config.layers[-1].experts
    file = GGUFFile.open(nextn.gguf_of("glm4moe"))
    shapes = {key: t.shape for key, t in file.tensors.items() if "nextn" not in key}
    stripped = ModelConfig.from_metadata(file.metadata, shapes)
    assert (stripped.nextn, stripped.layers) == ((), config.layers)


def test_of_a_recurrent_model_the_block_has_attention() -> None:
    config, _ = config_of("qwen35")
    assert [layer.kv_heads > 0 for layer in config.layers] == [False, False, True, False, True]
    assert (config.nextn[0].kv_heads, config.nextn[0].is_recurrent) == (2, False)
