"""Blocks that a format can hold exactly, rounded to the floats of a checkpoint or not, are found,
whatever importance their columns have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.blocks_legacy import pack_bf16
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.grid import GRIDS, BlockScales, Grid, pack

SIMPLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
EACH = pytest.mark.parametrize("format_name", SIMPLE)
ANY_SEED = given(seed=st.integers(0, 2**32 - 1))
FEW = settings(max_examples=10, deadline=None)
N_BLOCKS = 64
# Without an offset a lattice is looked for where blocks use the ends of the levels, as all do that
# an encoder has written.
FROM_END_TO_END = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")
# Levels of Q8_0 are as fine as BF16 itself: which one a weight had is not always to be told.
MOST_MISSED = {"Q8_0": 0.05}


def blocks_of(grid: Grid, seed: int) -> np.ndarray:
    """float32 (N_BLOCKS, 32), decoded from random half floats and integers of random ranges."""
    rng = np.random.default_rng(seed)
    top = len(grid.levels) - 1
    q = np.empty((N_BLOCKS, 32), np.uint8)
    for block in q:
        low, high = sorted(rng.integers(0, top + 1, 2))
        # One value alone need not be a half float, which an offset would have to be.
        if grid.name in FROM_END_TO_END or low == high:
            low, high = 0, top
        block[:] = rng.integers(low, high + 1, 32)
        block[:2] = low, high
    rng.permuted(q, axis=1, out=q)
    d = rng.uniform(0.5, 2, N_BLOCKS) * 10.0 ** rng.uniform(-3, 0)
    m = -d * rng.uniform(0, top, N_BLOCKS)
    ones = np.ones((N_BLOCKS, 1), np.int16)
    halves = [v.astype(np.float16).astype(np.float32) for v in (d, m)]
    return decoded(pack(BlockScales(grid, *halves, ones, 0 * ones), q), grid.name)


def decoded(data: np.ndarray, format_name: str) -> np.ndarray:
    return dequantize(data.reshape(-1), FORMATS[format_name], (len(data), 32))


def again(weights: np.ndarray, format_name: str) -> np.ndarray:
    return decoded(encode(weights, format_name, threads=1), format_name)


def bf16(x: np.ndarray) -> np.ndarray:
    bits = pack_bf16(x).reshape(-1).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(x.shape)


def half_place(x: np.ndarray, bits: int) -> np.ndarray:
    """Half a unit of the last of this many bits of each x."""
    return np.ldexp(1.0, np.frexp(x)[1] - bits - 1) * (x != 0)


@EACH
@FEW
@ANY_SEED
def test_what_was_decoded_comes_back_to_the_bit(format_name: str, seed: int) -> None:
    weights = blocks_of(GRIDS[format_name], seed)
    np.testing.assert_array_equal(again(weights, format_name), weights)


@EACH
@FEW
@ANY_SEED
def test_what_was_rounded_to_f16_since_comes_back_within_that(format_name: str, seed: int) -> None:
    weights = blocks_of(GRIDS[format_name], seed).astype(np.float16).astype(np.float32)
    off = np.abs(again(weights, format_name) - weights) - half_place(weights, 11)
    assert (off <= 0).all()


@EACH
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@FEW
@ANY_SEED
def test_what_was_rounded_to_bf16_since_comes_back_within_that(
    format_name: str, is_weighted: bool, seed: int
) -> None:
    weights = bf16(blocks_of(GRIDS[format_name], seed))
    importance = None
    if is_weighted:
        importance = np.exp(np.random.default_rng(seed).standard_normal(32)).astype(np.float32)
    found = decoded(encode(weights, format_name, importance, threads=1), format_name)
    is_off = (np.abs(found - weights) > half_place(weights, 8)).any(axis=1)
    assert is_off.mean() <= MOST_MISSED.get(format_name, 0)
