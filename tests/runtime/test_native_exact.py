"""Integer arithmetic of the products: with scales of small integers times powers of two, results
are exact, so every kernel of every format must equal float64 to the last bit.

Covers the largest and smallest codes and scales a block can hold, activations of +-127 in every
sign pattern (two products overflow an int16 where a kernel is careless), each half of a block
alone, zero blocks, negative and subnormal half-precision scales.
"""

from __future__ import annotations

import numpy as np
import pytest
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.random_blocks import SCALES
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.reference_math import round_bf16
from martlet.runtime.ops import BufferKind
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .native_library import ISAS
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, Chunk, make_step

COLS = 512
HALF = 16  # columns of the finest sub-block scale
MAX_ROWS = 200
# Half-precision scales, one per weight row: of either sign, up to 2 ** 10, down to the smallest
# normal number, subnormal ones of one bit and of several.
ROW_SCALES = [1, -1, 0.5, -1024, 2**-14, -(2**-14), 2**-15, -(2**-24), 3 * 2**-24, 0]
BYTES = (0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0, 0x55, 0xAA)  # codes and scales at their extremes


def activations(rng: np.random.Generator) -> np.ndarray:
    """(n, COLS) integers; every block of 32 is zero or holds a +-127, so its scale is exactly 1."""
    signs = [np.resize(s, HALF) for s in ([1], [-1], [1, -1], [1, 1, -1, -1], [1] * 4 + [-1] * 4)]
    rows = []
    for half in range(COLS // HALF):  # one half of one block at a time: sub-sums, B110
        for sign in signs:
            row = np.zeros(COLS, np.int64)
            row[half * HALF : (half + 1) * HALF] = 127 * sign
            rows.append(row)
    for _ in range(8):  # all blocks at once, small beside the one value that sets the scale
        row = rng.integers(-9, 10, COLS)
        row[rng.integers(0, 32, COLS // 32) + np.arange(0, COLS, 32)] = rng.choice((-127, 127))
        row[: 32 * rng.integers(0, 3)] = 0
        rows.append(row)
    return np.array([*rows, np.zeros(COLS, np.int64)])


def weights(format_name: str, rng: np.random.Generator) -> StoredTensor:
    """Rows of constant bytes, rows of random bytes; scales from ROW_SCALES."""
    fmt = FORMATS[format_name]
    per_row = COLS // fmt.block
    patterns = [np.full((per_row, fmt.nbytes), byte, np.uint8) for byte in BYTES]
    patterns += [rng.integers(0, 256, (per_row, fmt.nbytes), dtype=np.uint8) for _ in range(5)]
    rows = [pattern.copy() for pattern in patterns for _ in ROW_SCALES]
    for row, scale in zip(rows, ROW_SCALES * len(patterns), strict=True):
        is_power = format_name == "MXFP4"  # of two: never 0, and the least are taken for 0
        SCALES[format_name].write(row, np.full(per_row, float(scale or is_power)), -1)
    return StoredTensor(fmt, (len(rows), COLS), np.concatenate(rows).reshape(-1))


def float_weights(format_name: str, rng: np.random.Generator) -> StoredTensor:
    values = rng.integers(-64, 65, (70, COLS)).astype(np.float32)
    stored = values.view(np.uint32) >> 16 if format_name == "BF16" else values
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[format_name]
    raw = stored.astype(dtype).reshape(-1).view(np.uint8)
    return StoredTensor(FORMATS[format_name], values.shape, raw)


def native_products(
    w: StoredTensor,
    x: np.ndarray,
    *,
    precise: bool = False,
    activations: BufferKind = BufferKind.Q8,
    isa: str,
    n_threads: int,
) -> np.ndarray:
    """x @ w.T through one linear op, (n, rows of w)."""
    store = StoredWeights({"x": StoredTensor.from_floats(x), "w": w})
    plan = PlanBuilder(store, MAX_ROWS, activations)
    rows = plan.take_rows(plan.embed(plan.weight("x", *x.shape)))
    plan.linear(rows, [plan.weight("w", *w.shape)], name="logits", logits=True, precise=precise)
    executor = NativeExecutor(plan.finish(), store, n_blocks=16, isa=isa, n_threads=n_threads)
    try:
        return executor.run(make_step([Chunk(range(len(x)), 0, range(16))]))
    finally:
        executor.close()


def exact_products(w: StoredTensor, x: np.ndarray) -> np.ndarray:
    """In float64, every term and every partial sum of which is exact."""
    values = dequantize(w.data, w.format, w.shape).astype(np.float64)
    return x.astype(np.float64) @ values.T


def fits_float32(w: StoredTensor, x: np.ndarray) -> np.ndarray:
    """Where the sums after every half block are float32 numbers, so that no order can round."""
    values = dequantize(w.data, w.format, w.shape).astype(np.float64)
    total, fits = 0.0, np.ones((len(x), len(values)), bool)
    for at in range(0, COLS, HALF):
        total = total + x[:, at : at + HALF] @ values[:, at : at + HALF].T
        fits &= total.astype(np.float32) == total
    return fits


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_block_formats_are_exact(name: str, precise: bool) -> None:
    rng = np.random.default_rng(sum(map(ord, name)))
    w, x = weights(name, rng), activations(rng)
    expected, fits = exact_products(w, x), fits_float32(w, x)
    assert fits.mean() > 0.9
    assert np.abs(expected[fits]).max() > 2**16
    for isa in ISAS:
        mine = native_products(w, x, precise=precise, isa=isa, n_threads=2)
        wrong = np.argwhere((mine != expected) & fits)
        assert not len(wrong), (isa, wrong[:3], mine[tuple(wrong[0])], expected[tuple(wrong[0])])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_row_alone_is_as_exact(name: str) -> None:
    rng = np.random.default_rng(1)
    w, x = weights(name, rng), activations(rng)
    for isa in ISAS:
        together = native_products(w, x, precise=False, isa=isa, n_threads=1)
        for i in range(0, len(x), 17):
            alone = native_products(w, x[i : i + 1], precise=False, isa=isa, n_threads=1)
            np.testing.assert_array_equal(alone, together[i : i + 1], err_msg=isa)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_formats_are_exact(name: str) -> None:
    rng = np.random.default_rng(2)
    w, x = float_weights(name, rng), activations(rng)
    expected = exact_products(w, x)
    assert fits_float32(w, x).all()
    for isa in ISAS:
        mine = native_products(w, x, precise=False, isa=isa, n_threads=2)
        np.testing.assert_array_equal(mine, expected, err_msg=isa)


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_products_of_bf16_rows_are_those_of_the_same_floats(name: str) -> None:
    rng = np.random.default_rng(3)
    w = weights(name, rng) if name in BLOCK_FORMATS else float_weights(name, rng)
    x = rng.standard_normal((MAX_ROWS, COLS)).astype(np.float32)
    of_floats = native_products(
        w, round_bf16(x), activations=BufferKind.F32, isa="scalar", n_threads=2
    )
    for isa in ISAS:
        mine = native_products(w, x, activations=BufferKind.BF16, isa=isa, n_threads=2)
        np.testing.assert_array_equal(mine, of_floats, err_msg=isa)
        alone = native_products(w, x[7:8], activations=BufferKind.BF16, isa=isa, n_threads=1)
        np.testing.assert_array_equal(alone, of_floats[7:8], err_msg=isa)


def test_every_isa_rounds_to_the_same_bf16() -> None:
    """Every pattern of the bits around the cut, in normal numbers of all sizes."""
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    heads = np.array([0x80, 0x81, 0x3F80, 0x3F81, 0x3FFF, 0x7F7E], np.uint32) << 16
    bits = np.concatenate([sign | heads[:, None] | tails for sign in np.uint32([0, 1 << 31])])
    x = np.resize(bits.reshape(-1), (5, 32)).view(np.float32)
    w = StoredTensor.from_floats(np.eye(32))
    expected = round_bf16(x)
    assert not np.array_equal(expected, x)
    largest = np.diag(np.full(32, 0x7F7F8000, np.uint32)).view(np.float32)
    for isa in ISAS:
        mine = native_products(w, x, activations=BufferKind.BF16, isa=isa, n_threads=1)
        np.testing.assert_array_equal(mine, expected, err_msg=isa)
        beyond = native_products(w, largest, activations=BufferKind.BF16, isa=isa, n_threads=1)
        assert np.isposinf(np.diag(beyond)).all(), isa


def test_q6_k_holds_a_scale_of_minus_128() -> None:
    """The one int8 scale whose magnitude is no int8, at the lowest code (-32)."""
    fmt = FORMATS["Q6_K"]
    block = np.zeros(fmt.nbytes, np.uint8)
    block[192:208] = 0x80
    block[208:210] = np.array(1, "<f2").reshape(1).view(np.uint8)
    w = StoredTensor(fmt, (1, COLS), np.tile(block, COLS // 256))
    x = np.full((1, COLS), 127, np.int64)
    for isa in ISAS:
        mine = native_products(w, x, precise=False, isa=isa, n_threads=1)
        assert mine == -128 * -32 * 127 * COLS
