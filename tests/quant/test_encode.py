"""Encoders: bytes that decode to what the search believed, errors no larger than the stock
rounding's, bad weights refused, the same bytes for any number of threads."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from martlet.quant.blocks_legacy import pack_bf16
from martlet.quant.encode import ENCODABLE, BadWeights, encode
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.grid import GRIDS, Grid, fit_block_scales, fit_blocks, pack, round_to_grid

GOLDEN = Path(__file__).parents[1] / "data" / "quantizer" / "errors.npz"
EACH = pytest.mark.parametrize("format_name", ENCODABLE)
EACH_GRID = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)


def some_weights(rows: int = 8, cols: int = 512, seed: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row_scale = 0.02 * np.exp(0.5 * rng.standard_normal((rows, 1)))
    return (row_scale * rng.standard_normal((rows, cols))).astype(np.float32)


def decoded(data: np.ndarray, format_name: str, cols: int) -> np.ndarray:
    return dequantize(data.reshape(-1), FORMATS[format_name], (len(data), cols))


def relative_error(
    x: np.ndarray, format_name: str, importance: np.ndarray | None = None
) -> np.ndarray:
    y = decoded(encode(x, format_name, importance, threads=1), format_name, x.shape[1])
    return ((x - y) ** 2).sum(axis=0) / (x**2).sum()


@EACH_GRID
def test_bytes_decode_to_what_was_fitted(grid: Grid) -> None:
    x = some_weights(4, 512).reshape(-1, grid.block)
    scales, q = fit_blocks(x, grid)
    believed = np.repeat(scales.step, grid.sub, axis=1) * grid.levels[q]
    believed += np.repeat(scales.offset, grid.sub, axis=1)
    stored = FORMATS[grid.name].decode(pack(scales, q))
    assert (stored == believed).all()
    assert not (stored == 0).all()


@EACH_GRID
def test_every_field_of_a_block_is_packed_at_its_place(grid: Grid) -> None:
    """Random scales and integers over their whole ranges, not only those a fit would choose."""
    rng = np.random.default_rng(1)
    n, top = 50, len(grid.levels)
    scales, _ = fit_blocks(rng.standard_normal((n, grid.block)).astype(np.float32), grid)
    if "s" in grid.fields:
        low, high = grid.scales
        scales.s[:] = rng.integers(low, high + 1, scales.s.shape)
        if "o" in grid.fields:
            scales.o[:] = rng.integers(low, high + 1, scales.o.shape)
    q = rng.integers(0, top, (n, grid.block)).astype(np.uint8)
    wanted = np.repeat(scales.step, grid.sub, axis=1) * grid.levels[q]
    wanted += np.repeat(scales.offset, grid.sub, axis=1)
    assert (FORMATS[grid.name].decode(pack(scales, q)) == wanted).all()


@EACH_GRID
def test_column_by_column_is_the_same_rounding(grid: Grid) -> None:
    x = some_weights(6, 256).reshape(-1, grid.block)
    scales = fit_block_scales(x, grid.name)
    q = np.empty(x.shape, np.uint8)
    for j in range(grid.block):
        q[:, j], y = round_to_grid(x[:, j], scales, j)
        candidates = scales.step[:, j // grid.sub, None] * grid.levels
        candidates = candidates + scales.offset[:, j // grid.sub, None]
        nearest = np.abs(candidates - x[:, j, None]).min(axis=1)
        np.testing.assert_allclose(np.abs(y - x[:, j]), nearest, rtol=1e-4, atol=1e-9)
    _, at_once = fit_blocks(x, grid)
    rows = FORMATS[grid.name].decode(pack(scales, q))
    rows_at_once = FORMATS[grid.name].decode(pack(scales, at_once))
    # Ties may round to either side.
    np.testing.assert_allclose(((rows - x) ** 2).sum(), ((rows_at_once - x) ** 2).sum(), rtol=1e-5)


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_error_is_below_that_of_the_gguf_package(format_name: str) -> None:
    x = some_weights()
    kind = gguf.GGMLQuantizationType[format_name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    assert relative_error(x, format_name).sum() < 0.95 * ((x - theirs) ** 2).sum() / (x**2).sum()


@pytest.mark.parametrize("format_name", GRIDS)
def test_important_columns_are_nearer(format_name: str) -> None:
    x = some_weights()
    importance = np.exp(1.2 * np.random.default_rng(0).standard_normal(x.shape[1]))
    importance = importance.astype(np.float32)
    plain = (importance * relative_error(x, format_name)).sum()
    weighted = (importance * relative_error(x, format_name, importance)).sum()
    assert weighted < 0.95 * plain
    # The scale of the importance means nothing, nor does evenness.
    same = encode(x, format_name, importance * np.float32(1024), threads=1)
    assert (same == encode(x, format_name, importance, threads=1)).all()
    even = encode(x, format_name, np.full(x.shape[1], 7, np.float32), threads=1)
    assert (even == encode(x, format_name, threads=1)).all()


@EACH
def test_threads_change_nothing(format_name: str) -> None:
    x = some_weights(700, 512)
    one = encode(x, format_name, threads=1)
    assert (one == encode(x, format_name, threads=3)).all()
    assert (one[300:400] == encode(x[300:400], format_name, threads=1)).all()


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_its_place(
    format_name: str, bad: float
) -> None:
    x = some_weights(600, 512)
    x[321, 77] = bad
    with pytest.raises(BadWeights, match=r"\[321, 77\] is -?(nan|inf): not finite"):
        encode(x, format_name)


@pytest.mark.parametrize("format_name", ["F16", "Q4_0", "Q6_K"])
def test_a_weight_beyond_half_floats_is_refused(format_name: str) -> None:
    x = some_weights(1, 256)
    x[0, 9] = -70000
    with pytest.raises(BadWeights, match=r"\[0, 9\] is -70000.0: .* holds up to 65504"):
        encode(x, format_name)


@EACH
def test_zeros_stay_zeros_and_small_weights_stay_finite(format_name: str) -> None:
    x = some_weights(6, 256)
    x[0] = 0
    x[1, 32:64] = 0
    x[2] = np.float32(1e-42)  # subnormal
    x[3] *= np.float32(1e-6)
    x[4] = 0.5
    x[5] *= np.float32(65504) / np.abs(x[5]).max()
    with np.errstate(all="raise", under="ignore"):
        y = decoded(encode(x, format_name), format_name, 256)
    assert np.isfinite(y).all()
    assert not y[0].any()
    assert not y[1, 32:64].any()
    assert np.abs(y[2]).max() <= 1e-7
    assert np.abs(y[3] - x[3]).max() <= np.abs(x[3]).max()
    np.testing.assert_allclose(y[4], 0.5, rtol=0.01)


@EACH_GRID
def test_one_large_weight_does_not_take_the_others_along(grid: Grid) -> None:
    """Sub-blocks of very different size (1, 1e-3, 1e3) in one row keep their own scales."""
    x = some_weights(1, 768)
    x[0, :256] *= np.float32(1e-3)
    x[0, 512:] *= np.float32(1e3)
    y = decoded(encode(x, grid.name), grid.name, 768)
    for part in (slice(0, 256), slice(256, 512), slice(512, 768)):
        assert ((x - y)[0, part] ** 2).sum() < 0.15 * (x[0, part] ** 2).sum()


def test_importance_of_zero_everywhere_and_in_one_block() -> None:
    x = some_weights(2, 64)
    importance = np.ones(64, np.float32)
    importance[:32] = 0
    assert (encode(x, "Q4_0", importance) == encode(x, "Q4_0")).all()


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(32), r"shape \(32,\), the matrix has 64 columns"),
        (np.where(np.arange(64) == 5, -1, 1), "column 5 is -1"),
        (np.where(np.arange(64) == 6, np.nan, 1), "column 6 is nan"),
    ],
)
def test_bad_importance_is_refused(importance: np.ndarray, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        encode(some_weights(1, 64), "Q4_0", importance)


def test_bad_shapes_and_names_are_refused() -> None:
    with pytest.raises(FileFormatError, match="rows of 48 weights do not fill Q4_0 blocks of 32"):
        encode(np.zeros((1, 48), np.float32), "Q4_0")
    with pytest.raises(UnsupportedError, match="no 'IQ2_XS'; it writes F32, F16"):
        encode(np.zeros((1, 32), np.float32), "IQ2_XS")


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    rounded = pack_bf16(bits.view(np.float32)).view("<u2")
    assert rounded[:3].tolist() == [0x3F80, 0x3F82, 0x7F80]
    quiet = (rounded[3:].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(quiet).all()
    assert (rounded[3:] & 0x40).all()


@pytest.mark.parametrize("format_name", ["F32", "F16", "BF16"])
def test_plain_floats_are_those_of_the_gguf_package(format_name: str) -> None:
    x = some_weights()
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[format_name])
    assert (encode(x, format_name) == theirs.view(np.uint8)).all()


def golden(importance: bool) -> list[tuple[str, int, float]]:
    with np.load(GOLDEN) as file:
        errors = file["weighted_errors" if importance else "errors"]
        return [
            (str(name), i, float(error))
            for name, row in zip(file["formats"], errors, strict=True)
            for i, error in enumerate(row)
        ]


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("format_name", GRIDS)
def test_no_tensor_has_a_larger_error_than_llama_quantize_s(
    format_name: str, is_weighted: bool
) -> None:
    """Rows of a trained model; the errors were recorded by scripts/record_quantizer.py."""
    compared = [entry for entry in golden(is_weighted) if entry[0] == format_name]
    with np.load(GOLDEN) as file:
        for _, i, theirs in compared:
            x, importance = file[f"rows{i}"], file[f"importance{i}"] if is_weighted else None
            y = decoded(encode(x, format_name, importance, threads=1), format_name, x.shape[1])
            rest = (x - y).astype(np.float64) ** 2
            ours = (rest if importance is None else importance * rest).sum()
            assert ours < 0.98 * theirs
    assert len(compared) == 6
