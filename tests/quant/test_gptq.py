"""Rounding with feedback: less error on the inputs it was made for, and on others like them."""

from __future__ import annotations

import numpy as np
import pytest
from martlet.quant.encode import encode
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.gptq import Feedback, layer_error, quantize_rows
from martlet.quant.grid import GRIDS

ROWS, COLS = 24, 256


def correlated(n_tokens: int, seed: int) -> np.ndarray:
    """float64 (COLS, COLS): second moment of inputs that live mostly in a few directions."""
    mix = np.random.default_rng(0).standard_normal((COLS, COLS)) * 0.9 ** np.arange(COLS)
    x = np.random.default_rng(seed).standard_normal((n_tokens, COLS)) @ mix.T
    x += 0.1 * np.random.default_rng(seed + 1).standard_normal(x.shape)
    return x.T @ x / n_tokens


def matrix() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)


def decoded(data: np.ndarray, name: str) -> np.ndarray:
    return dequantize(data.reshape(-1), FORMATS[name], (ROWS, COLS))


@pytest.mark.parametrize("name", GRIDS)
def test_less_error_on_other_tokens_than_rounding_alone(name: str) -> None:
    seen, unseen = correlated(4000, 2), correlated(4000, 3)
    values = matrix()
    importance = seen.diagonal().astype(np.float32)
    alone = layer_error(values, decoded(encode(values, name, importance), name), unseen).sum()
    data = quantize_rows(values, name, Feedback.of(seen, 0.05))
    assert data.shape == (ROWS, FORMATS[name].data_bytes((COLS,)))
    assert layer_error(values, decoded(data, name), unseen).sum() < 0.7 * alone


def test_layer_error_is_that_of_the_products() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((50, COLS))
    values, rounded = matrix(), matrix() + np.float32(0.1)
    expected = (((values - rounded).astype(np.float64) @ x.T) ** 2).mean(axis=1)
    assert np.allclose(layer_error(values, rounded, x.T @ x / 50), expected)


def test_rows_do_not_depend_on_others_nor_bytes_on_threads() -> None:
    values = np.random.default_rng(5).standard_normal((1100, COLS)).astype(np.float32)
    feedback = Feedback.of(correlated(2000, 6), 0.1)
    whole = quantize_rows(values, "Q4_K", feedback, threads=1)
    assert np.array_equal(whole, quantize_rows(values, "Q4_K", feedback, threads=3))
    assert np.array_equal(whole[130:140], quantize_rows(values[130:140], "Q4_K", feedback))


def test_weights_on_the_grid_stay_as_they_are() -> None:
    """A file that is quantized again in its own format loses nothing."""
    stored = encode(matrix(), "Q5_0")
    values = decoded(stored, "Q5_0")
    again = decoded(quantize_rows(values, "Q5_0", Feedback.of(correlated(2000, 7), 0.1)), "Q5_0")
    assert np.abs(again - values).max() < 1e-3 * np.abs(values).max()


def test_inputs_that_never_occur_are_no_trouble() -> None:
    moment = correlated(2000, 8)
    moment[:40] = 0
    moment[:, :40] = 0
    for each in (moment, np.zeros((COLS, COLS))):
        data = quantize_rows(matrix(), "Q4_0", Feedback.of(each, 0.1))
        assert np.abs(decoded(data, "Q4_0") - matrix()).max() < 2
