"""The estimate against what the native executor allocates, and against sizes worked out by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime import estimate as formulas
from martlet.runtime.config import ModelConfig
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.model import size_pool
from martlet.runtime.models import record_nextn, record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.state_slots import SPARE_STATES
from martlet.runtime.step import MOST_GUESSES, Step
from martlet.runtime.weights import StoredWeights

from .. import nextn
from ..recorded import recorded_model
from .native_library import IS_SANITIZED  # skips the file where there is no native library
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, TinyDims, TinyModel, tiny_model

FOLDER = os.environ.get("MARTLET_TEST_MODELS")


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *FLOAT_FORMATS])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2", "qwen2moe"])
def test_sizes_are_what_the_native_executor_allocates(fmt: str, arch: str) -> None:
    model = tiny_model(arch, formats=(fmt,))
    plan = model.plan()
    for kv_type in KvType:
        executor = NativeExecutor(
            plan, model.weights, n_blocks=37, kv_type=kv_type, n_threads=2, block_tokens=32
        )
        assert executor.weight_bytes == formulas.weight_bytes(plan)
        assert executor.kv_bytes == 37 * sum(formulas.kv_block_bytes(plan, 32, kv_type))
        assert executor.arena_bytes == pytest.approx(
            formulas.arena_bytes(plan, 37 * 32, 2), rel=0.1, abs=512 << 10
        )
        executor.close()


def test_a_table_that_stays_in_the_file_takes_no_memory() -> None:
    config, weights = recorded_model("gemma4-shared", "Q8_0")
    plan = record_plan(config, weights, 64)
    stays = [tensor.name for tensor in plan.tensors if tensor.stays]
    assert stays == ["per_layer_token_embd.weight"]
    executor = NativeExecutor(plan, weights, n_blocks=9, n_threads=2, block_tokens=32)
    assert executor.weight_bytes == formulas.weight_bytes(plan)
    assert executor.kv_bytes == 9 * sum(formulas.kv_block_bytes(plan, 32, KvType.F16))
    assert len(plan.kv_layers) == 3, "three of six layers have keys"
    executor.close()


def test_layers_of_a_large_pool_enter_new_pages_in_turns_and_not_at_one_block() -> None:
    model = tiny_model("llama")
    plan = model.plan()
    block = sum(formulas.kv_block_bytes(plan, 32, KvType.F16))
    n_blocks = (8 << 20) * len(plan.kv_layers) // block + 1  # reserved, and hardly touched
    executor = NativeExecutor(plan, model.weights, n_blocks=n_blocks, n_threads=1)
    assert 0 < executor.kv_bytes - n_blocks * block <= 2 << 20
    ends = [executor.run(decode_step(block)).tobytes() for block in (0, n_blocks - 1)]
    assert ends[0] == ends[1]
    executor.close()


def test_states_and_what_takes_guesses_back_are_allocated_as_estimated() -> None:
    model = TinyModel(*recorded_model("qwen35", "Q8_0"))
    plan = model.plan()
    sizes = {"n_blocks": 2, "n_threads": 1, "n_states": 3}
    for n_guesses in (0, 8):
        executor = NativeExecutor(plan, model.weights, n_guesses=n_guesses, **sizes)
        n_layers = 3 * len(plan.states)  # each part begins on a cache line
        for found, expected in (
            (executor.state_bytes, 3 * plan.state_bytes),
            (executor.guess_bytes, 3 * n_guesses * plan.guess_bytes),
        ):
            assert expected <= found <= expected + 64 * n_layers
        executor.close()
    found = estimated(1 << 30, plan=plan)
    assert found.guesses == (2 + SPARE_STATES) * MOST_GUESSES * plan.guess_bytes > 0
    assert estimated(1 << 30, plan=plan, n_guesses=0).total == found.total - found.guesses


def test_a_block_that_guesses_is_allocated_as_estimated() -> None:
    file = GGUFFile.open(nextn.gguf_of("glm4moe"))
    weights = StoredWeights(file.tensors)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes)
    plan, block = record_plan(config, weights, 64), record_nextn(config, weights, 64)
    executor = NativeExecutor(block, weights, n_blocks=9, n_threads=2, block_tokens=32)
    assert executor.weight_bytes == formulas.weight_bytes(block)
    assert executor.kv_bytes == 9 * sum(formulas.kv_block_bytes(block, 32, KvType.F16))
    executor.close()
    found, without = estimated(1 << 30, plan=plan, nextn=block), estimated(1 << 30, plan=plan)
    assert found.nextn > formulas.weight_bytes(block)
    assert found.total == without.total + found.nextn


def decode_step(block: int) -> Step:
    ints = [np.array(values, np.int32) for values in ([1], [0], [0, 1], [[block]], [0])]
    return Step(*ints)


def test_layers_with_a_window_have_fewer_blocks() -> None:
    model = tiny_model("gemma3")
    plan = model.plan()
    full, windowed = formulas.kv_block_bytes(plan, 32, KvType.F16)
    assert full == windowed > 0
    executor = NativeExecutor(plan, model.weights, n_blocks=37, n_window_blocks=5, n_threads=1)
    assert executor.kv_bytes == 37 * full + 5 * windowed
    executor.close()


def test_the_pool_of_a_model_with_windows_follows_its_window() -> None:
    """Gemma 3's proportions: most of what whole contexts would take is not allocated."""
    dims = TinyDims(n_layers=6, window=64)
    plan = tiny_model("gemma3", dims=dims).plan()
    whole = sum(formulas.kv_block_bytes(plan, 32, KvType.F16)) * 4096 // 32
    found = formulas.estimate(
        plan,
        context=4096,
        context_train=4096,
        sequences=1,
        block_tokens=32,
        kv_type=KvType.F16,
        n_threads=1,
        weights_mapped=0,
        process=0,
        available=1 << 30,
    )
    assert found.kv_lower < found.kv_pool < 0.7 * whole
    pool = size_pool(plan, tiny_model("gemma3", dims=dims).config, 32, kv_bytes=found.kv_pool)
    assert pool.n_blocks * found.context >= 128
    assert pool.n_window_blocks
    assert pool.n_window_blocks < pool.n_blocks // 2


def test_the_lower_bound_of_a_window_stops_growing() -> None:
    dims = TinyDims(heads=4, kv_heads=2, head_dim=64, n_layers=2, window=20)
    plan = tiny_model("gemma3", dims=dims).plan()
    per_layer = 2 * (64 + 64) * 2  # kv heads x (key + value) x f16
    assert formulas.kv_lower_bytes(plan, 10, KvType.F16) == 2 * 10 * per_layer
    assert formulas.kv_lower_bytes(plan, 300, KvType.F16) == (20 + 300) * per_layer
    assert formulas.attention_kind(plan) == "1 x GQA 2:1 window 20, 1 x GQA 2:1"


@pytest.mark.parametrize(("kv_heads", "kind"), [(4, "MHA 1:1"), (2, "GQA 2:1"), (1, "MQA 4:1")])
def test_attention_kinds(kv_heads: int, kind: str) -> None:
    plan = tiny_model("llama", dims=TinyDims(kv_heads=kv_heads)).plan()
    assert formulas.attention_kind(plan) == kind
    assert formulas.kv_lower_bytes(plan, 100, KvType.F16) == 2 * 100 * kv_heads * 128 * 2


def estimated(available: int, **options: Any) -> formulas.MemoryEstimate:
    given: dict[str, Any] = {"context": 64, "sequences": 2, "context_train": 10**6, **options}
    return formulas.estimate(
        given.pop("plan", None) or tiny_model("llama").plan(),
        block_tokens=32,
        kv_type=KvType.F16,
        n_threads=2,
        weights_mapped=0,
        process=10**8,
        available=available,
        **given,
    )


def test_the_largest_context_fits_and_a_block_more_does_not() -> None:
    available = 200 << 20
    largest = estimated(available).largest_context
    assert largest > 1000
    assert estimated(available, context=largest).fits
    assert not estimated(available, context=largest + 1).fits
    assert estimated(available, context_train=100).largest_context == 100
    assert estimated(1000).largest_context == 0
    assert not estimated(1000).fits


def test_without_a_packed_copy_less_memory_will_do() -> None:
    found = estimated(1 << 30)
    needed = found.total - found.process
    spared = found.weights_packed - found.weights_raw
    assert spared > 0
    for available, fits, from_file in (
        (needed, True, True),
        (needed - 1, False, True),
        (needed - spared, False, True),
        (needed - spared - 1, False, False),
    ):
        tight = replace(found, available=available)
        assert (tight.fits, tight.fits_from_file) == (fits, from_file)


def test_the_pool_is_never_below_the_lower_bound() -> None:
    for context in (1, 31, 32, 33, 500):
        found = estimated(1 << 30, context=context)
        assert found.kv_pool >= found.kv_lower
        assert found.total == found.weights_packed + found.kv_pool + found.arena + 10**8


ESTIMATE = """
import json, sys
from dataclasses import asdict
from martlet.scripts.estimate import estimate_file
found = estimate_file(sys.argv[1], context=2048, sequences=4)
print(json.dumps({**asdict(found), "total": found.total}))
"""
MEASURE = """
import sys
from martlet.runtime.engine import Engine
from martlet.runtime.machine import resident_bytes
from martlet.runtime.model import load_model
from martlet.runtime.sampling_params import SamplingParams
model = load_model(sys.argv[1], executor="native", context=2048, kv_bytes=int(sys.argv[2]))
engine = Engine(model.executor, model.tokenizer, context=2048)
for block in range(1, model.executor.n_blocks):
    model.executor.copy_block(0, block, (0, block % model.executor.n_window_blocks))
engine.submit([5] * 300, SamplingParams(max_tokens=5), lambda event: None)
while engine.step():
    pass
print(resident_bytes())
"""


@pytest.mark.skipif(IS_SANITIZED or sys.platform != "linux", reason="needs the plain build, Linux")
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_real_model_is_resident_as_estimated(name: str) -> None:
    """Every block touched, one request served: within 5 %."""
    path = Path(FOLDER or "") / f"{name}.gguf"
    if FOLDER is None or not path.exists():
        pytest.skip(f"set MARTLET_TEST_MODELS to a folder with {name}.gguf")

    def run(code: str, *arguments: str) -> str:
        return subprocess.check_output([sys.executable, "-c", code, *arguments], text=True)

    found = json.loads(run(ESTIMATE, str(path)))
    resident = int(run(MEASURE, str(path), str(found["kv_pool"])))
    assert resident == pytest.approx(found["total"], rel=0.05)
