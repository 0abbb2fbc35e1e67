"""The C executor against the reference op by op, and against recorded logits, on every ISA."""

import numpy as np
import pytest
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType
from martlet.runtime.weights import StoredTensor

from ..recorded import RELATIVE_ERROR, TINY, error_of, recorded_ids, recorded_model
from .native_library import ISAS
from .op_cases import OP_CASES, OpBuilder, OpCase, one_step
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, run_tokens, tiny_model

# A key on a rounding boundary of the int8 cache may fall to the other side.
KV_TOLERANCE = 5e-3
FLOAT_MODEL_TOLERANCE = 1e-3  # two layers; keys on a rounding boundary of half precision


def relative_error(mine: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size:
        return float(mine.shape != expected.shape)
    return float(np.abs(mine - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_every_op_on_every_isa(case: OpCase) -> None:
    expected = case.run(ReferenceExecutor)
    runs = {isa: case.run(NativeExecutor, isa=isa, n_threads=2) for isa in ISAS}
    for isa, steps in runs.items():
        for mine, step in zip(steps, expected, strict=True):
            assert relative_error(mine, step) <= case.tolerance, isa
        for mine, scalar in zip(steps, runs["scalar"], strict=True):
            np.testing.assert_array_equal(mine, scalar, err_msg=f"{isa} against scalar")


@pytest.mark.parametrize("name", TINY)
def test_transformers_on_every_isa(name: str) -> None:
    config, weights = recorded_model(name)
    ids = recorded_ids(name)
    plan = record_plan(config.at_context(len(ids)), weights, max_rows=8)
    for isa in ISAS:
        executor = NativeExecutor(
            plan, weights, n_blocks=4, kv_type=KvType.F32, isa=isa, n_threads=2
        )
        logits = run_tokens(executor, ids)
        executor.close()
        assert error_of(name, logits) < RELATIVE_ERROR, isa


@pytest.mark.parametrize("activations", [BufferKind.Q8, BufferKind.BF16])
@pytest.mark.parametrize("lane", [0, 5, 16, 31])
def test_one_nan_among_activations_is_not_rounded_away(lane: int, activations: BufferKind) -> None:
    """The maximum of a block must not lose it: its code would be a harmless 0."""

    def infinities_that_cancel(b: OpBuilder, x: int) -> int:
        for sign in (1, -1):
            table = np.ones((23, 64))
            table[:, lane] = sign * 3e38
            b.tensors[f"t{sign}"] = StoredTensor.from_floats(table)
            b.plan.add(b.plan.embed(b.plan.weight(f"t{sign}", 23, 64), scale=10.0), to=x)
        return x

    shown = {"show_blocks": True, "precise": True, "activations": activations}
    case = OpCase("nan", 64, infinities_that_cancel, one_step(3), **shown)
    for isa in ISAS:
        (out,) = case.run(NativeExecutor, isa=isa)
        assert np.isnan(out).all(), isa


ATTENTION_CASES = [case for case in OP_CASES if case.name.startswith("attention")]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.Q8_0], ids=["f32", "q8_0"])
def test_other_caches_on_every_isa(case: OpCase, kv_type: KvType) -> None:
    expected = case.run(ReferenceExecutor, kv_type=kv_type)
    scalar = case.run(NativeExecutor, isa="scalar", n_threads=1, kv_type=kv_type)
    for isa in ISAS:
        steps = case.run(NativeExecutor, isa=isa, n_threads=2, kv_type=kv_type)
        for mine, same, step in zip(steps, scalar, expected, strict=True):
            assert relative_error(mine, step) <= max(KV_TOLERANCE, case.tolerance), isa
            np.testing.assert_array_equal(mine, same, err_msg=f"{isa} against scalar")


# A value on a rounding boundary of bf16 moves by 1/256 of itself.
ROUNDED_MODEL_TOLERANCE = {BufferKind.F32: FLOAT_MODEL_TOLERANCE, BufferKind.BF16: 1e-2}


@pytest.mark.parametrize("activations", ROUNDED_MODEL_TOLERANCE)
@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_float_activations_on_every_format(fmt: str, activations: BufferKind) -> None:
    model = tiny_model("gemma3", formats=(fmt,))
    plan = record_plan(model.config, model.weights, 64, activations=activations)
    tokens = [7 * i % 300 for i in range(40)]
    expected = run_tokens(ReferenceExecutor(plan, model.weights, n_blocks=4), tokens)
    runs = [
        run_tokens(NativeExecutor(plan, model.weights, n_blocks=4, isa=isa), tokens, chunk=chunk)
        for isa, chunk in zip(["scalar", *ISAS], [0, 1, 7, 40, 13], strict=False)
    ]
    assert relative_error(runs[0], expected) < ROUNDED_MODEL_TOLERANCE[activations]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])
