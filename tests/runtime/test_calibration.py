"""What products read: the same sums on every executor, of the rows that the ops really take."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from martlet.runtime.calibration import Calibrator, InputMoments, observed_inputs
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.choice import executor_class
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind

from ..recorded import recorded_model
from .tiny import Chunk, TinyDims, TinyModel, make_step, run_tokens, tiny_model

DIMS = TinyDims(dim=64, ffn_dim=96, heads=4, kv_heads=2, head_dim=16, vocab_size=90)
TOKENS = [(7 * i) % 90 for i in range(40)]


def moments(model: TinyModel, name: str, *, full: bool = True) -> list[InputMoments]:
    calibrator = Calibrator(model.config, model.weights, context=40, full=full, executor=name)
    sums = calibrator.empty()
    calibrator.add(TOKENS, sums)
    calibrator.add(TOKENS[:10], sums)
    calibrator.close()
    return sums


@pytest.fixture(params=["llama", "gemma3", "qwen2"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param, formats=("Q8_0", "F16"), dims=DIMS)


def native() -> None:
    try:
        executor_class("native")
    except (ImportError, OSError, ModelError) as error:
        pytest.skip(f"native is not available: {error}")


def test_native_sums_what_the_reference_sums(model: TinyModel) -> None:
    native()
    for ours, expected in zip(moments(model, "native"), moments(model, "reference"), strict=True):
        assert ours.weights == expected.weights
        assert ours.n_rows == expected.n_rows == 50
        found, wanted = ours.mean_products(), expected.mean_products()
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
        assert np.allclose(found.diagonal(), ours.squares / 50, rtol=1e-5)


def test_every_matrix_is_observed_once(model: TinyModel) -> None:
    names = [name for sums in moments(model, "reference", full=False) for name in sums.weights]
    matrices = {n for n in model.weights.names() if len(model.weights.shape(n)) == 2}
    assert sorted(names) == sorted(matrices)


@pytest.mark.parametrize("name", ["phi3", "qwen35"])
def test_some_rows_of_a_tensor_are_observed_under_its_name(name: str) -> None:
    config, weights = recorded_model(name)
    plan = record_plan(config, weights, 8, activations=BufferKind.F32, keep=True)
    names = [name for group in observed_inputs(plan).values() for name in group]
    assert len(set(names)) == len(names)
    assert set(names) <= set(weights.names())


def test_moments_of_wide_rows_are_those_of_all_rows() -> None:
    rows = np.random.default_rng(0).standard_normal((90, 600)).astype(np.float32)
    parts = [InputMoments.empty(("w",), 600, is_full=True) for _ in range(2)]
    parts[0].add(rows[:30])
    parts[1].add(rows[30:80])
    parts[1].add(rows[80:])
    found = parts[0].joined(parts[1]).mean_products()
    wanted = rows.astype(np.float64).T @ rows / 90
    assert np.abs(found - wanted).max() < 1e-6
    assert np.array_equal(found, found.T)


def test_squares_alone_are_the_diagonal(model: TinyModel) -> None:
    full, squares = moments(model, "reference"), moments(model, "reference", full=False)
    for a, b in zip(full, squares, strict=True):
        with pytest.raises(ModelError, match="only squares"):
            b.mean_products()
        assert np.allclose(a.squares, b.squares, rtol=1e-5)


def test_rows_multiplied_by_the_weight_are_the_logits() -> None:
    """The head's input is that of the logits: its moment through the weight is theirs."""
    model = tiny_model("llama", formats=("F32",), dims=DIMS)
    head = moments(model, "reference")[-1]
    assert head.weights == ("token_embd.weight",)
    weight = model.weights.dequantized("token_embd.weight").astype(np.float64)
    plan = record_plan(model.config, model.weights, 64, activations=BufferKind.F32)
    from martlet.runtime.executors.reference import ReferenceExecutor

    executor = ReferenceExecutor(plan, model.weights, n_blocks=2)
    logits = np.concatenate([run_tokens(executor, TOKENS), run_tokens(executor, TOKENS[:10])])
    expected = (logits.astype(np.float64) ** 2).sum(axis=0)
    found = np.einsum("vi,ij,vj->v", weight, 50 * head.mean_products(), weight)
    assert np.abs(found - expected).max() < 2e-3 * expected.max()  # keys are halves there


def test_kept_buffers_change_no_bit(model: TinyModel) -> None:
    native()
    options = {"activations": BufferKind.F32}
    plans = [record_plan(model.config, model.weights, 40, keep=k, **options) for k in (False, True)]
    shared, kept = (NativeExecutor(plan, model.weights, n_blocks=2) for plan in plans)
    assert np.array_equal(run_tokens(shared, TOKENS), run_tokens(kept, TOKENS))
    spans = sorted((b.offset, b.row_bytes * 40) for b in plans[1].buffers if b.offset >= 0)
    for (start, n_bytes), (following, _) in pairwise(spans):
        assert start + n_bytes <= following


def test_rows_that_are_not_there_are_refused() -> None:
    native()
    model = tiny_model("llama", dims=DIMS)
    plan = record_plan(model.config, model.weights, 8)  # with int8 activations
    executor = NativeExecutor(plan, model.weights, n_blocks=2)
    executor.run(make_step([Chunk(TOKENS[:4], 0, [0])]))
    logits = next(i for i, b in enumerate(plan.buffers) if b.is_logits)
    rounded = next(i for i, b in enumerate(plan.buffers) if b.kind is BufferKind.Q8)
    for buffer, n_rows in ((logits, 1), (rounded, 1), (0, 9), (0, -1)):
        with pytest.raises((ModelError, ValueError)):
            executor.read_rows(buffer, n_rows)
    with pytest.raises(ModelError, match="the context is 4"):
        Calibrator(model.config, model.weights, context=4, executor="reference").add(TOKENS, [])
