"""The pieces below the numba executor: repacking, dot products per CPU, exp, quantization."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from martlet.runtime.executors import numba_dot4, numba_llvm, numba_vectors
from martlet.runtime.executors.numba_math import Q8Views, exp
from martlet.runtime.executors.numba_rowops import embed_quantized, quantize_rows
from martlet.runtime.executors.numba_vectors import F32X16, I32X16, intrinsic, load, pointer, store
from martlet.runtime.executors.numba_weights import pack_quantized
from martlet.runtime.executors.reference_math import quantize_q8
from martlet.runtime.ops import q8_row_bytes
from martlet.runtime.weights import StoredWeights
from numba import njit, types
from numba.core.registry import cpu_target

from .tiny import BLOCK_FORMATS, random_tensor

HOST = cpu_target.target_context
EXP_TOLERANCE = 2.5e-7  # two units in the last place of float32


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("rows", [(1,), (16,), (37,), (5, 20, 9)])
def test_repacked_weights_are_the_same_numbers(fmt: str, rows: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    weights = StoredWeights(
        {f"w{i}": random_tensor(fmt, (n, 512), rng) for i, n in enumerate(rows)}
    )
    names = list(weights.names())
    packed = pack_quantized(names, weights, n_threads=2)
    out = np.empty((sum(rows), 512), np.float32)
    embed_quantized(packed, np.arange(sum(rows), dtype=np.int32), np.float32(1), out, False)
    np.testing.assert_array_equal(out, np.concatenate([weights.dequantized(n) for n in names]))


# -- dot4 ---------------------------------------------------------------------------------------


def _dot4_of(row: tuple[Any, ...] | None) -> Any:
    """A kernel that uses one row of the instruction table, or plain multiplies for None."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if row is None:
            return numba_dot4._plain(builder, *args)
        _, build, lanes, name = row
        return build(builder, lanes, name, *args[:2], numba_llvm.spread(builder, args[2]))

    dot = intrinsic(lambda typing, acc, codes, x: (I32X16(I32X16, I32X16, types.int32), generate))

    @njit
    def run(codes: np.ndarray, x: np.ndarray, start: np.ndarray, out: np.ndarray) -> None:
        acc = numba_vectors.splat_i(start[0])
        vector = dot(acc, numba_vectors.load_bytes(pointer(codes), 0), x[0])
        store(pointer(out), 0, numba_vectors.to_float(vector))

    return run


@pytest.mark.parametrize(
    "row", [None, *numba_dot4._X86], ids=lambda r: r[2:] and str(r[3]) if r else "plain"
)
def test_every_dot_product_gives_the_same_integers(row: tuple[Any, ...] | None) -> None:
    if row is not None and not numba_llvm.target_has(HOST, row[0]):
        pytest.skip(f"this CPU has no {row[0]}")
    run, rng = _dot4_of(row), np.random.default_rng(1)
    for codes, x in (
        (rng.integers(0, 256, 64), rng.integers(-128, 128, 4)),
        (np.full(64, 255), np.full(4, -128)),
        (np.full(64, 255), np.full(4, 127)),
    ):
        out, start = np.empty(16, np.float32), np.array([-1000], np.int32)
        run(codes.astype(np.uint8), x.astype(np.int8).view(np.int32), start, out)
        np.testing.assert_array_equal(out, codes.reshape(16, 4) @ x - 1000)


# -- float16, and the arithmetic that stands in for it on CPUs without ---------------------------

_OLD_CPU = SimpleNamespace(codegen=lambda: SimpleNamespace(magic_tuple=lambda: ("x86_64", "", "")))


@pytest.mark.parametrize("context", [HOST, _OLD_CPU], ids=["host", "old"])
def test_every_half_float_widens_and_narrows(context: Any) -> None:
    @intrinsic
    def widened(typing: Any, halves: Any, at: Any) -> Any:
        def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
            to = numba_llvm.SHORTS.as_pointer()
            address = builder.bitcast(builder.gep(args[0], [args[1]]), to)
            return numba_llvm.widen(context, builder, builder.load(address, align=2))

        return F32X16(halves, types.intp), generate

    @intrinsic
    def narrowed(typing: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
            return numba_llvm.narrow(context, builder, args[0])

        return types.uint16(types.float32), generate

    @njit
    def run(bits: np.ndarray, floats: np.ndarray, values: np.ndarray, back: np.ndarray) -> None:
        for i in range(0, bits.size, 16):
            store(pointer(floats), i, widened(pointer(bits), i))
        for j in range(values.size):
            back[j] = narrowed(values[j])

    bits = np.arange(1 << 16, dtype=np.uint16)
    halves, floats = bits.view(np.float16), np.empty(1 << 16, np.float32)
    with np.errstate(over="ignore"):
        known = np.sort(halves[np.isfinite(halves)].astype(np.float32))
        between = np.concatenate([known, (known[1:] + known[:-1]) / 2])  # ties
        around = [np.nextafter(between, np.float32(towards)) for towards in (-np.inf, np.inf)]
        extremes = np.array([np.inf, -np.inf, 65519.9, 65520, 1e30, 1e-30, -1e-45], np.float32)
        values = np.concatenate([between, *around, extremes])
        expected = values.astype(np.float16)
    back = np.empty(len(values), np.uint16)
    run(bits, floats, values, back)
    np.testing.assert_array_equal(floats, halves.astype(np.float32))
    np.testing.assert_array_equal(back, expected.view(np.uint16))
    run(bits, floats, np.array([np.nan], np.float32), back)
    assert np.isnan(back[:1].view(np.float16))


# -- exp and quantization -----------------------------------------------------------------------


@njit
def _exp_of(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        store(pointer(out), i, exp(load(pointer(x), i)))


def test_exp_is_exact_to_rounding_over_the_whole_range() -> None:
    x = np.linspace(-87, 88.7, 16 * 4096, dtype=np.float32)
    out = np.empty_like(x)
    _exp_of(x, out)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(out - expected) / expected).max() <= EXP_TOLERANCE


def test_exp_of_the_extremes() -> None:
    x = np.zeros(16, np.float32)
    x[:7] = -np.inf, np.inf, np.nan, -1e30, 1e30, 0, -0.0
    out = np.empty_like(x)
    _exp_of(x, out)
    np.testing.assert_array_equal(out[:7], [0, np.inf, np.nan, 0, np.inf, 1, 1])


def _q8_rows(n_rows: int, width: int) -> Q8Views:
    rows = np.zeros((n_rows, q8_row_bytes(width) if n_rows else 0), np.uint8)
    return Q8Views(rows.view(np.int8), rows.view(np.int32), rows.view(np.float32))


def _quantized(x: np.ndarray, rest: Q8Views | None = None) -> Q8Views:
    q8 = _q8_rows(*x.shape)
    quantize_rows(x, q8, rest or _q8_rows(0, 0), len(x))
    return q8


@pytest.mark.parametrize("n_rows", [1, 9])
def test_quantized_rows_are_the_reference_s_bit_for_bit(n_rows: int) -> None:
    x = np.random.default_rng(5).standard_normal((n_rows, 96)).astype(np.float32)
    x[0, :32] = 0
    x[0, 32:64] = np.linspace(-127, 127, 32)
    x[-1, 64:] *= 1e-41  # too small to be told from zero
    mine, expected, n_blocks = _quantized(x), quantize_q8(x), 3
    np.testing.assert_array_equal(mine.codes[:, :96], expected.q)
    np.testing.assert_array_equal(mine.floats[:, 24:27], expected.d)
    sums = expected.q.astype(np.int32).reshape(n_rows, 2 * n_blocks, 16).sum(2)
    np.testing.assert_array_equal(mine.words[:, 33:39], sums)  # h
    np.testing.assert_array_equal(mine.words[:, 27:30], sums.reshape(n_rows, 3, 2).sum(2))  # s
    ds = expected.d * mine.words[:, 27:30].astype(np.float32)
    np.testing.assert_array_equal(mine.floats[:, 30:33], ds)
    halves = np.repeat(expected.d, 2, axis=1) * sums.astype(np.float32)
    np.testing.assert_array_equal(mine.floats[:, 39:45], halves)  # dh


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_shows_in_its_scale(bad: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = bad
    mine = _quantized(x)
    assert not np.isfinite(mine.floats[0, 16])
    assert mine.floats[0, 17] == np.float32(1) / np.float32(127)  # the block beside it is whole


def test_the_rest_holds_what_the_coarse_plane_left() -> None:
    x = np.random.default_rng(6).standard_normal((5, 64)).astype(np.float32)
    rest = _q8_rows(*x.shape)
    coarse, expected = _quantized(x, rest), quantize_q8(x - quantize_q8(x).floats())
    np.testing.assert_array_equal(coarse.codes, _quantized(x).codes)
    np.testing.assert_array_equal(rest.codes[:, :64], expected.q)
    np.testing.assert_array_equal(rest.floats[:, 16:18], expected.d)
