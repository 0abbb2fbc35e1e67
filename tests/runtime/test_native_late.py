"""Experts that stay in the mapped file until a row chooses them: the same bits, less memory, and
bad values found when they are met."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from martlet.runtime import estimate as formulas
from martlet.runtime.errors import FileFormatError, UnsupportedError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.model import load_model
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind
from martlet.runtime.plan import Plan
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import gguf_of
from .native_library import IS_SANITIZED  # skips the file where there is no native library
from .test_native_load import CLEAR, mapped, resident_bytes, written
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, TinyDims, TinyModel, run_tokens, tiny_model

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 300, 33)]


def opened(model: TinyModel, folder: Path) -> StoredWeights:
    return mapped(written(model, folder / "weights"), folder / "weights")


def executor_of(
    model: TinyModel, weights: StoredWeights, late: bool, **how: object
) -> NativeExecutor:
    plan = record_plan(model.config, weights, 64, **how)  # type: ignore[arg-type]
    return NativeExecutor(plan, weights, n_blocks=4, n_threads=2, mmap_experts=late)


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_logits_are_the_same_bits(fmt: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2moe", formats=(fmt,))
    weights = opened(model, tmp_path)
    for activations in (BufferKind.Q8, BufferKind.F32):
        logits = []
        for late in (False, True):
            executor = executor_of(model, weights, late, activations=activations)
            logits += [run_tokens(executor, TOKENS, chunk=chunk) for chunk in (64, 5, 1)]
            executor.close()
        for other in logits[1:]:
            np.testing.assert_array_equal(other, logits[0])


def test_what_is_late_is_what_experts_take() -> None:
    model = tiny_model("qwen2moe")
    plan = model.plan()
    names = {plan.tensors[at].name.split(".", 2)[2] for at in plan.experts_alone()}
    assert names == {f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert not tiny_model("llama").plan().experts_alone()


def test_what_others_read_is_packed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of a product over all rows are packed by no one thread: C heeds no flag there."""
    model = tiny_model("qwen2moe")
    weights = opened(model, tmp_path)
    at_once = executor_of(model, weights, late=False)
    expected = run_tokens(at_once, TOKENS, chunk=64)
    at_once.close()
    monkeypatch.setattr(Plan, "experts_alone", lambda plan: frozenset(range(len(plan.tensors))))
    executor = executor_of(model, weights, late=True)
    monkeypatch.undo()
    assert executor.late_bytes == formulas.late_bytes(model.plan())
    np.testing.assert_array_equal(run_tokens(executor, TOKENS, chunk=64), expected)
    executor.close()


def test_other_executors_refuse() -> None:
    with pytest.raises(UnsupportedError, match="executor reference holds all weights"):
        load_model(gguf_of("qwen3moe"), executor="reference", mmap_experts=True, context=64)
    model = load_model(gguf_of("qwen3moe"), executor="native", mmap_experts=True, context=64)
    assert getattr(model.executor, "late_bytes") > 0  # noqa: B009
    model.close()


def test_sizes_are_told(tmp_path: Path) -> None:
    model = tiny_model("qwen2moe")
    weights = opened(model, tmp_path)
    executor = executor_of(model, weights, late=True)
    assert executor.late_bytes == formulas.late_bytes(model.plan()) > 0
    assert executor.weight_bytes == formulas.weight_bytes(model.plan())
    executor.close()
    at_once = executor_of(model, model.weights, late=True)  # not in a mapped file
    assert at_once.late_bytes == 0
    at_once.close()


@pytest.mark.skipif(IS_SANITIZED, reason="memory comes from malloc then")
@pytest.mark.skipif(not CLEAR.exists(), reason="this system does not tell memory")
def test_experts_that_nobody_chose_take_no_memory(tmp_path: Path) -> None:
    dims = TinyDims(dim=256, ffn_dim=1024, n_layers=2, n_experts=24)
    model = tiny_model("qwen2moe", formats=("Q8_0",), dims=dims)
    weights = opened(model, tmp_path)
    executor = executor_of(model, weights, late=True)
    room = executor.late_bytes
    before = resident_bytes("RssAnon")
    run_tokens(executor, [3], chunk=1)
    grown = resident_bytes("RssAnon") - before
    executor.close()
    assert room > 4 << 20
    assert grown < 0.5 * room, "a row chose a few of 24"


def test_a_bad_value_is_told_when_its_expert_is_chosen(tmp_path: Path) -> None:
    model = tiny_model("qwen2moe")
    name = "blk.1.ffn_down_exps.weight"
    stored = model.weights._tensors[name]
    n_experts, n_rows, _ = stored.shape
    data = stored.data.reshape(n_experts * n_rows, -1).copy()
    data[::n_rows, 34:36] = np.array([0x7E00], np.uint16).view(np.uint8)  # a scale of each expert
    tensors = {
        **model.weights._tensors,
        name: StoredTensor(stored.format, stored.shape, data.reshape(-1)),
    }
    spoilt = TinyModel(model.config, StoredWeights(tensors))
    weights = opened(spoilt, tmp_path)
    with pytest.raises(FileFormatError, match=name):
        executor_of(spoilt, weights, late=False)
    executor = executor_of(spoilt, weights, late=True)
    for _ in range(2):
        with pytest.raises(FileFormatError, match=rf"{name}.* at \[\d, 0, 32\]"):
            run_tokens(executor, TOKENS[:2], chunk=2)
    executor.close()
