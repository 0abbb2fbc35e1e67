"""The kernels against the dense search in NumPy: their errors are as small."""

import numpy as np
import pytest
from martlet.quant import encode_reference
from martlet.quant.grid import GRIDS, Grid, fit_blocks

N_BLOCKS = {32: 6, 256: 1}


def blocks(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Weights and importance, both float32 (n, block)."""
    rng = np.random.default_rng(grid.block)
    n = N_BLOCKS[grid.block]
    x = rng.standard_t(5, (n, grid.block)) * np.exp(rng.standard_normal((n, 1)))
    w = np.exp(rng.standard_normal((n, grid.block)))
    w /= w.max(axis=1, keepdims=True)
    return x.astype(np.float32), w.astype(np.float32)


def weighted_error(grid: Grid, x: np.ndarray, w: np.ndarray, fit: str) -> float:
    n = len(x)
    scales, q = fit_blocks(x, grid, w)
    if fit == "reference":
        scales.s[:], scales.o[:] = 1, 0
        q = np.empty((n * grid.subs, grid.sub), np.uint8)
        sub_x, sub_w = x.reshape(-1, grid.sub), w.reshape(-1, grid.sub)
        encode_reference.fit(grid.name, sub_x, sub_w, scales.d, scales.m, scales.s, scales.o, q)
    step, offset = scales.step[:, :, None], scales.offset[:, :, None]
    y = step * grid.levels[q.reshape(n, grid.subs, grid.sub)] + offset
    return float((w * (x - y.reshape(x.shape)).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_the_kernel_s_error_is_that_of_the_dense_search(grid: Grid, is_weighted: bool) -> None:
    x, w = blocks(grid)
    w = w if is_weighted else np.ones_like(w)
    kernel, reference = (weighted_error(grid, x, w, fit) for fit in ("kernel", "reference"))
    assert 0.8 * reference < kernel < 1.1 * reference
