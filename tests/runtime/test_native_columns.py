"""Every number of activation rows up to 40: whole and partial passes of each kernel, the few rows
that are read straight from packed memory, what AMX tiles leave over. A row's bits are those that
the scalar kernels give for the row alone."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from martlet.quant.formats import FORMATS
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.ops import Activation
from martlet.runtime.plan import Plan
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .native_library import IS_SANITIZED, ISAS
from .tiny import BLOCK_FORMATS, Chunk, make_step, random_tensor

MAX_ROWS = 40
N_OUT = 64 + 9  # the last tile is mostly padding
ROW_COUNTS = (1, 7, 13, 25) if IS_SANITIZED else range(1, MAX_ROWS + 1)


def record(format_name: str, is_gated: bool, precise: bool) -> tuple[Plan, StoredWeights]:
    """One product or gated pair. An odd number of blocks a row, more than are unpacked at once."""
    rng = np.random.default_rng(sum(map(ord, format_name)))
    block = FORMATS[format_name].block
    width = block * (5 if block > 32 else 37)
    x = rng.standard_normal((MAX_ROWS, width)).astype(np.float32)
    x[3, 64:96] = 0  # a block without a scale
    tensors = {"x": StoredTensor.from_floats(x), "eye": StoredTensor.from_floats(np.eye(N_OUT))}
    names = ["gate", "up"] if is_gated else ["w"]
    for name in names:
        tensors[name] = random_tensor(format_name, (N_OUT, width), rng, width**-0.5)
    weights = StoredWeights(tensors)
    plan = PlanBuilder(weights, MAX_ROWS)
    rows = plan.embed(plan.weight("x", *x.shape))
    shown = plan.linear(rows, [plan.weight(n, N_OUT, width) for n in names], precise=precise)
    if is_gated:
        shown = plan.glu(shown, Activation.SILU)
    eye = plan.weight("eye", N_OUT, N_OUT)
    plan.linear(plan.take_rows(shown), [eye], name="logits", logits=True)
    return plan.finish(), weights


def products(executor: NativeExecutor, first: int, stop: int) -> np.ndarray:
    step = make_step([Chunk(range(first, stop), 0, range(2))])
    return executor.run(step).copy()


@pytest.mark.parametrize("precise", [False, True], ids=["one-plane", "two-planes"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_any_number_of_rows_gives_the_bits_of_each_alone(
    name: str, is_gated: bool, precise: bool
) -> None:
    plan, weights = record(name, is_gated, precise)
    with closing(NativeExecutor(plan, weights, n_blocks=2, isa="scalar", n_threads=1)) as scalar:
        n_most = max(ROW_COUNTS)
        alone = np.concatenate([products(scalar, i, i + 1) for i in range(n_most)])
    assert np.abs(alone).max() > 0.1
    for isa in ISAS:
        with closing(NativeExecutor(plan, weights, n_blocks=2, isa=isa, n_threads=2)) as executor:
            for n in ROW_COUNTS:
                together = products(executor, 0, n)
                np.testing.assert_array_equal(together, alone[:n], err_msg=f"{isa}, {n} rows")
