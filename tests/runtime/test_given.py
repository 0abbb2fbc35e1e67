"""Rows that a step gives beside its tokens: as many as the plan takes, or the step is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors import Executor
from martlet.runtime.executors.choice import create_executor, executor_class
from martlet.runtime.ops import OpKind
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .op_cases import OP_CASES
from .tiny import Chunk, make_step

NAMES = ("reference", "numba", "native")
STEP = make_step([Chunk([1, 2, 3], 0, [0])], [0, 2])
ROWS = np.arange(96, dtype=np.float32).reshape(3, 32)


def executor_of(name: str, takes: bool) -> Executor:
    """Logits are the rows given, or those of the unit matrix."""
    try:
        executor_class(name)
    except (ImportError, OSError, ModelError) as error:
        pytest.skip(f"{name} is not available: {error}")
    weights = StoredWeights({"t": StoredTensor.from_floats(np.eye(32))})
    plan = PlanBuilder(weights, 8)
    table = plan.weight("t", 32, 32)
    rows = plan.take_rows(plan.given(32) if takes else plan.embed(table))
    plan.linear(rows, [table], name="logits", logits=True)
    return create_executor(name, plan.finish(), weights, n_blocks=1, block_tokens=16)[0]


@pytest.mark.parametrize("name", NAMES)
def test_rows_given_are_taken(name: str) -> None:
    executor = executor_of(name, takes=True)
    for rows in (ROWS, ROWS[:, ::-1]):
        assert (executor.run(replace(STEP, given=rows)) == rows[[0, 2]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_too_few_and_too_many_are_refused(name: str) -> None:
    executor = executor_of(name, takes=True)
    for rows in (None, ROWS[:2], ROWS[:, :31]):
        with pytest.raises(ModelError, match=r"expected \(3, 32\)"):
            executor.run(replace(STEP, given=rows))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"expected \(3, 0\)"):
        executor_of(name, takes=False).run(replace(STEP, given=ROWS))


@pytest.mark.parametrize(
    ("name", "element", "value"),
    [("i", 0, 6), ("i", 0, -1), ("in", 0, 99), ("in", 0, -1), ("flags", 0, 1), ("out_rest", 0, 0)],
)
def test_copies_that_do_not_fit_are_refused(name: str, element: int, value: int) -> None:
    """Of [given | x], the copy of x: into columns that are not there, of no buffer, …"""
    hostile = pytest.importorskip("tests.runtime.test_native_hostile")
    case = next(case for case in OP_CASES if case.name == "given-5")
    records = hostile.Records.of(*case.build())
    assert not hostile.try_engine(records.copy())
    at = hostile.op_of(records, OpKind.COPY, 2)
    field = records.ops[name]
    field.reshape(len(field), -1)[at, element] = value
    assert "operands that do not fit" in hostile.try_engine(records)


def test_a_width_that_is_not_the_buffer_s_is_refused() -> None:
    hostile = pytest.importorskip("tests.runtime.test_native_hostile")
    case = next(case for case in OP_CASES if case.name == "given-5")
    for width in (0, 4, 6):
        records = hostile.Records.of(*case.build())
        records.sizes["given"] = width
        assert "operands that do not fit" in hostile.try_engine(records)
