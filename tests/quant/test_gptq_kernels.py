"""The loops of rounding with feedback, against their definitions written out with whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from martlet.quant.gptq_kernels import descend, refit, round_block

ROWS, COLS, SUB = 7, 64, 16
LEVELS = np.arange(-8, 8, dtype=np.float32)


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Weights (ROWS, COLS), a second moment (COLS, COLS), steps and offsets (ROWS, COLS / SUB)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((200, COLS)) @ rng.standard_normal((COLS, COLS))
    h = (x.T @ x / 200).astype(np.float32)
    w = rng.standard_normal((ROWS, COLS)).astype(np.float32)
    step = rng.uniform(0.2, 0.4, (ROWS, COLS // SUB)).astype(np.float32)
    offset = rng.uniform(-0.1, 0.1, step.shape).astype(np.float32)
    return w, h, step, offset


def decoded(codes: np.ndarray, step: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return np.repeat(step, SUB, axis=1) * LEVELS[codes] + np.repeat(offset, SUB, axis=1)


def nearest(w: np.ndarray, step: np.ndarray, offset: np.ndarray) -> np.ndarray:
    wanted = (w - np.repeat(offset, SUB, axis=1)) / np.repeat(step, SUB, axis=1)
    return np.abs(wanted[:, :, None] - LEVELS).argmin(axis=2).astype(np.uint8)


def cost(w: np.ndarray, values: np.ndarray, h: np.ndarray) -> np.ndarray:
    error = (w - values).astype(np.float64)
    return np.einsum("ri,ij,rj->r", error, h.astype(np.float64), error)


def test_feedback_column_by_column_over_two_blocks() -> None:
    w, h, step, offset = case(1)
    upper = np.linalg.cholesky(np.linalg.inv(h.astype(np.float64))).T
    u = (upper / upper.diagonal()[:, None]).astype(np.float32)

    shifted, expected = w.copy(), np.zeros(w.shape, np.uint8)
    for j in range(COLS):
        expected[:, j] = nearest(shifted, step, offset)[:, j]
        error = shifted[:, j] - decoded(expected, step, offset)[:, j]
        shifted[:, j + 1 :] -= np.outer(error, u[j, j + 1 :])

    half = COLS // 2
    found, behind = np.empty(w.shape, np.uint8), w.copy()
    for start in (0, half):
        here, groups = slice(start, start + half), slice(start // SUB, (start + half) // SUB)
        scales = [np.ascontiguousarray(a[:, groups]) for a in (step, offset)]
        shifted = np.ascontiguousarray(behind[:, here])
        found[:, here], lost = round_block(shifted, *scales, LEVELS, SUB, u[here, here])
        behind[:, start + half :] -= lost @ u[here, start + half :]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("seed", range(5))
def test_descent_ends_where_no_single_code_lowers_the_error(seed: int) -> None:
    w, h, step, offset = case(seed)
    codes = nearest(w, step, offset)
    before = cost(w, decoded(codes, step, offset), h)
    descend((w - decoded(codes, step, offset)) @ h, h, step, offset, LEVELS, SUB, codes, 100)
    least = cost(w, decoded(codes, step, offset), h)
    assert (least <= before).all()
    assert least.sum() < before.sum()
    for j in range(COLS):
        for move in (-1, 1):
            other = codes.copy()
            other[:, j] = np.clip(codes[:, j].astype(int) + move, 0, len(LEVELS) - 1)
            assert (cost(w, decoded(other, step, offset), h) > least * (1 - 1e-3)).all()


@pytest.mark.parametrize("has_m", [False, True])
def test_refit_lowers_the_error_of_every_row_and_leaves_half_floats(has_m: bool) -> None:
    w, h, step, offset = case(9)
    step, offset = (np.float32(np.float16(a)) for a in (step, offset * has_m))
    d, m = step[:, 0].copy(), offset[:, 0].copy()
    step, offset = (np.repeat(a[:, :1], COLS // SUB, axis=1) for a in (step, offset))
    codes = nearest(w, step, offset)
    before = cost(w, decoded(codes, step, offset), h)
    g = (w - decoded(codes, step, offset)) @ h
    by_d, by_m = LEVELS[codes], np.ones_like(w)
    refit(g, by_d, by_m, by_d @ h, by_m @ h, has_m, d, m)
    step, offset = (np.repeat(a[:, None], COLS // SUB, axis=1) for a in (d, m))
    after = cost(w, decoded(codes, step, offset), h)
    assert (after <= before).all()
    assert after.sum() < 0.98 * before.sum()
    for scales in (d, m):
        assert np.array_equal(scales, np.float32(np.float16(scales)))
    assert m.any() == has_m
    expected = (w - decoded(codes, step, offset)) @ h
    assert np.abs(g - expected).max() < 1e-3 * np.abs(expected).max()
