"""Weights without a packed copy: the same bits, almost no memory, bad values told at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from martlet.runtime import estimate as formulas
from martlet.runtime.errors import FileFormatError, ModelError, UnsupportedError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.model import load_model
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import gguf_of, recorded_model
from .native_library import IS_SANITIZED, ISAS  # skips the file where there is no native library
from .test_native_load import CLEAR, mapped, resident_bytes, written
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, TinyDims, TinyModel, run_tokens, tiny_model

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 300, 33)]
CHUNKS = (64, 5, 1)


def logits_of(model: TinyModel, weights: StoredWeights, **how: object) -> list[np.ndarray]:
    activations = how.pop("activations", BufferKind.Q8)
    plan = record_plan(model.config, weights, 64, activations=activations)  # type: ignore[arg-type]
    executor = NativeExecutor(plan, weights, n_blocks=4, **{"n_threads": 2, **how})  # type: ignore[arg-type]
    logits = [run_tokens(executor, TOKENS, chunk=chunk) for chunk in CHUNKS]
    executor.close()
    return logits


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_logits_are_the_same_bits(fmt: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2moe", formats=(fmt,))
    weights = mapped(written(model, tmp_path / "weights"), tmp_path / "weights")
    for activations in (BufferKind.Q8, BufferKind.F32):
        expected = logits_of(model, weights, activations=activations)
        for n_threads in (1, 3):
            how = {"activations": activations, "n_threads": n_threads}
            for found, packed in zip(
                logits_of(model, weights, repack=False, **how), expected, strict=True
            ):
                np.testing.assert_array_equal(found, packed)


@pytest.mark.parametrize("isa", ISAS)
def test_on_every_isa(isa: str) -> None:
    """Also weights that are in no mapped file."""
    model = tiny_model("llama", formats=("Q4_K", "Q8_0", "Q6_K", "Q5_0"), tied=False)
    expected = logits_of(model, model.weights, isa=isa)
    for found, packed in zip(
        logits_of(model, model.weights, isa=isa, repack=False), expected, strict=True
    ):
        np.testing.assert_array_equal(found, packed)


@pytest.mark.parametrize("name", ["deepseek2", "qwen35", "gemma4-shared"])
def test_heads_of_their_own_states_and_tables_of_the_file(name: str) -> None:
    model = TinyModel(*recorded_model(name, "Q8_0"))
    expected = logits_of(model, model.weights)
    for found, packed in zip(logits_of(model, model.weights, repack=False), expected, strict=True):
        np.testing.assert_array_equal(found, packed)


@pytest.mark.parametrize("arch", ["llama", "qwen2moe"])
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K", "F16"])
def test_sizes_are_those_of_the_estimate(arch: str, fmt: str) -> None:
    dims = TinyDims(dim=256, ffn_dim=2048)
    model = tiny_model(arch, formats=(fmt,), dims=dims)
    plan = model.plan()
    executor = NativeExecutor(plan, model.weights, n_blocks=37, n_threads=2, repack=False)
    assert executor.weight_bytes == formulas.weight_bytes(plan, repack=False)
    assert executor.weight_bytes < formulas.weight_bytes(plan) / 50
    assert executor.arena_bytes == pytest.approx(
        formulas.arena_bytes(plan, 37 * 32, 2, repack=False), rel=0.1, abs=512 << 10
    )
    executor.close()


@pytest.mark.parametrize("name", ["deepseek2", "qwen35", "gemma4-shared"])
def test_weights_made_of_some_rows_of_others_are_packed_and_counted(name: str) -> None:
    model = TinyModel(*recorded_model(name, "Q8_0"))
    plan = model.plan()
    executor = NativeExecutor(plan, model.weights, n_blocks=4, n_threads=1, repack=False)
    assert executor.weight_bytes == formulas.weight_bytes(plan, repack=False)
    executor.close()


@pytest.mark.skipif(IS_SANITIZED, reason="memory comes from malloc then")
@pytest.mark.skipif(not CLEAR.exists(), reason="this system does not tell memory")
def test_no_memory_but_the_files_is_taken(tmp_path: Path) -> None:
    dims = TinyDims(dim=512, ffn_dim=4096, n_layers=4)
    model = tiny_model(formats=("Q8_0",), dims=dims)
    weights = mapped(written(model, tmp_path / "weights"), tmp_path / "weights")
    plan = record_plan(model.config, weights, 8)
    file_bytes = (tmp_path / "weights").stat().st_size
    before = resident_bytes("RssAnon")
    executor = NativeExecutor(plan, weights, n_blocks=4, n_threads=1, repack=False)
    run_tokens(executor, TOKENS[:9], chunk=8)
    grown = resident_bytes("RssAnon") - before
    executor.close()
    assert file_bytes > 25 << 20
    assert grown < 12 << 20, "arena, scratch and keys, in huge pages of 2 MB"


def test_bad_values_are_told_at_load_with_their_place() -> None:
    model = tiny_model("qwen2")
    name = "blk.1.ffn_down.weight"
    stored = model.weights._tensors[name]
    data = stored.data.reshape(stored.shape[0], -1).copy()
    data[40, 34:36] = np.array([0x7E00], np.uint16).view(np.uint8)  # the second block's scale
    spoilt = StoredTensor(stored.format, stored.shape, data.reshape(-1))
    weights = StoredWeights({**model.weights._tensors, name: spoilt})
    for repack in (True, False):
        with pytest.raises(FileFormatError, match=rf"{name}.* at \[40, 32\]"):
            NativeExecutor(model.plan(), weights, n_blocks=4, n_threads=2, repack=repack)


def test_other_executors_refuse() -> None:
    with pytest.raises(UnsupportedError, match=r"reference holds all weights: leave no-repack"):
        load_model(gguf_of("qwen3moe"), executor="reference", repack=False, context=64)
    model = load_model(gguf_of("qwen3moe"), executor="native", repack=False, context=64)
    assert "no packed copy" in model.executor_reason
    model.close()


def test_a_slowed_thread_changes_no_bit_and_wrong_ones_are_refused() -> None:
    model = tiny_model("qwen2moe")
    executor = NativeExecutor(model.plan(), model.weights, n_blocks=4, n_threads=2)
    expected = [run_tokens(executor, TOKENS, chunk=chunk) for chunk in CHUNKS]
    for thread, times in ((1, 3.0), (0, 1.0)):
        executor.slow_down(thread, times)
        for chunk, logits in zip(CHUNKS, expected, strict=True):
            np.testing.assert_array_equal(run_tokens(executor, TOKENS, chunk=chunk), logits)
    for thread, times in ((2, 1.0), (-1, 1.0), (0, -1.0), (0, float("nan")), (0, 1e9)):
        with pytest.raises(ModelError, match="cannot slow thread"):
            executor.slow_down(thread, times)
    executor.close()
