"""MXFP4 blocks from floats: values of such blocks stay, others come as near as a block can."""

import gguf
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize

MXFP4 = FORMATS["MXFP4"]


def decoded(rows: np.ndarray) -> np.ndarray:
    return dequantize(encode(rows, "MXFP4").reshape(-1), MXFP4, rows.shape)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_values_of_blocks_stay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (64, MXFP4.nbytes), dtype=np.uint8)
    blocks[:, 0] = rng.integers(60, 200, 64)
    blocks[:8, 1:] &= 0x99  # nothing but 0 and the least value
    rows = MXFP4.decode(blocks).reshape(4, -1)
    np.testing.assert_array_equal(decoded(rows), rows)


def test_errors_are_no_larger_than_those_of_the_gguf_package() -> None:
    rows = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    qtype = gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.dequantize(gguf.quants.quantize(rows, qtype), qtype)
    mine = ((decoded(rows) - rows) ** 2).reshape(-1, 32).sum(axis=1)
    other = ((theirs - rows) ** 2).reshape(-1, 32).sum(axis=1)
    assert (mine <= other * (1 + 1e-6)).all()
    assert mine.sum() < 0.97 * other.sum()


def test_important_columns_choose_the_power() -> None:
    row = np.full((1, 32), 0.3, np.float32)
    row[0, 0] = 7.0
    importance = np.ones(32, np.float32)
    importance[0] = 1e-3
    plain, weighted = (
        dequantize(encode(row, "MXFP4", w).reshape(-1), MXFP4, row.shape)
        for w in (None, importance)
    )
    assert abs(weighted[0, 1] - 0.3) < abs(plain[0, 1] - 0.3)
    assert abs(weighted[0, 0] - 7) >= abs(plain[0, 0] - 7)


def test_a_weight_goes_to_its_nearest_value() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :6] = 6, 4.9, 5.1, 0.24, -0.26, -2.4
    assert decoded(row)[0, :6].tolist() == [6, 4, 6, 0, -0.5, -2]


def test_zeros_stay_zeros() -> None:
    assert not decoded(np.zeros((2, 64), np.float32)).any()
