"""Weights that a format has stored once lose nothing when they are stored in it again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.grid import GRIDS, BlockScales, Grid, pack

EACH_GRID = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
N_BLOCKS = 24
COLS = 512
# Most of Σ (difference)² / Σ weight² for what martlet wrote itself from random weights; none is
# lost elsewhere. A sub-block that leaves out levels at its ends can be counted in several ways,
# and all sub-blocks of a super-block must be counted as they were.
MOST_LOST = {
    "Q4_1": 1e-7,
    "Q5_1": 2e-7,
    "Q2_K": 3e-3,
    "Q4_K": 2e-5,
    "Q5_K": 5e-5,
    "Q6_K": 1e-6,
    "Q8_0": 1e-7,
}


def decoded(data: np.ndarray, format_name: str) -> np.ndarray:
    return dequantize(data.reshape(-1), FORMATS[format_name], (len(data), COLS))


def again(weights: np.ndarray, format_name: str) -> np.ndarray:
    return decoded(encode(weights, format_name, threads=1), format_name)


def full_blocks(grid: Grid, seed: int) -> np.ndarray:
    """float32 (rows, COLS): random scales and integers, the lowest and the highest level used in
    every sub-block."""
    rng = np.random.default_rng(seed)
    n, top = N_BLOCKS * COLS // grid.block, len(grid.levels) - 1
    d = rng.uniform(0.5, 2, n) * 10.0 ** rng.uniform(-3, 0)
    m = d * rng.uniform(1, 16, n)
    sign = 1 if "m" in grid.fields else rng.choice((-1, 1), n)
    low, high = grid.scales
    scales = BlockScales(
        grid,
        (d * sign).astype(np.float16).astype(np.float32),
        m.astype(np.float16).astype(np.float32),
        rng.integers(low, high + 1, (n, grid.subs)).astype(np.int16),
        rng.integers(0, high + 1, (n, grid.subs)).astype(np.int16),
    )
    q = rng.integers(0, top + 1, (n * grid.subs, grid.sub)).astype(np.uint8)
    q[:, 0], q[:, 1] = 0, top
    q = rng.permuted(q, axis=1).reshape(n, grid.block)
    return decoded(pack(scales, q).reshape(N_BLOCKS, -1), grid.name)


@pytest.mark.parametrize("name", [name for name in GRIDS if name not in ("Q2_K", "Q4_K", "Q5_K")])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_that_use_their_levels_come_back_to_the_bit(name: str, seed: int) -> None:
    weights = full_blocks(GRIDS[name], seed)
    np.testing.assert_array_equal(again(weights, name), weights)


@EACH_GRID
def test_what_was_quantized_here_is_nearly_always_kept(grid: Grid) -> None:
    rng = np.random.default_rng(5)
    spread = 0.02 * np.exp(0.5 * rng.standard_normal((64, 1)))
    weights = (rng.standard_t(5, (64, COLS)) * spread).astype(np.float32)
    once = again(weights, grid.name)
    twice = again(once, grid.name)
    assert not (once == weights).all()
    lost = ((twice - once).astype(np.float64) ** 2).sum() / (once.astype(np.float64) ** 2).sum()
    assert lost <= MOST_LOST.get(grid.name, 0)


@pytest.mark.parametrize("format_name", ["Q4_0", "Q5_0"])
def test_a_lattice_is_found_through_the_rounding_to_bf16(format_name: str) -> None:
    """As checkpoints trained for a format hold it: every integer is recovered."""
    weights = full_blocks(GRIDS[format_name], 9)
    bits = (weights.view(np.uint32) + 0x7FFF) & np.uint32(0xFFFF0000)
    found = again(bits.view(np.float32), format_name)
    assert (np.abs(found - weights) <= 2.0**-8 * np.abs(weights)).all()
