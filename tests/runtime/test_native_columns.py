"""Every number of activation rows up to 40: whole and partial passes of each kernel, the few rows
that are read straight from packed memory, what AMX tiles leave over. A row's bits are those that
the scalar kernels give for the row alone."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from martlet.runtime.executors.native import NativeExecutor

from .native_library import IS_SANITIZED, ISAS
from .product_cases import MAX_ROWS, product_plan
from .tiny import BLOCK_FORMATS, Chunk, make_step

ROW_COUNTS = (1, 7, 13, 25) if IS_SANITIZED else range(1, MAX_ROWS + 1)


def products(executor: NativeExecutor, first: int, stop: int) -> np.ndarray:
    step = make_step([Chunk(range(first, stop), 0, range(2))])
    return executor.run(step).copy()


@pytest.mark.parametrize("precise", [False, True], ids=["one-plane", "two-planes"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_any_number_of_rows_gives_the_bits_of_each_alone(
    name: str, is_gated: bool, precise: bool
) -> None:
    plan, weights = product_plan(name, is_gated, precise)
    with closing(NativeExecutor(plan, weights, n_blocks=2, isa="scalar", n_threads=1)) as scalar:
        n_most = max(ROW_COUNTS)
        alone = np.concatenate([products(scalar, i, i + 1) for i in range(n_most)])
    assert np.abs(alone).max() > 0.1
    for isa in ISAS:
        with closing(NativeExecutor(plan, weights, n_blocks=2, isa=isa, n_threads=2)) as executor:
            for n in ROW_COUNTS:
                together = products(executor, 0, n)
                np.testing.assert_array_equal(together, alone[:n], err_msg=f"{isa}, {n} rows")
