"""The formulas of comparing predictions, against values worked out by hand or the slow way."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from martlet.scripts.bootstrap import paired, resampled, standard_errors
from martlet.scripts.logit_stats import (
    TOKEN_SCORES,
    Divergence,
    log_softmax,
    paired_differences,
    token_scores,
)

LOGITS = arrays.arrays(np.float32, (2, 3, 7), elements=st.floats(-40, 40, width=32))


def of_probabilities(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows))


def test_one_token_by_hand() -> None:
    log_p = of_probabilities([0.5, 0.25, 0.25])
    log_q = of_probabilities([0.25, 0.25, 0.5])
    (score,) = token_scores(log_p, log_q, np.array([1]))
    # 0.5 ln 2 + 0 + 0.25 ln (1/2)
    assert score["kl"] == pytest.approx(0.25 * math.log(2))
    assert score["nll_base"] == score["nll"] == pytest.approx(math.log(4))
    assert not score["same_top"]


def test_tokens_up_to_the_floor_are_left_out() -> None:
    log_p = of_probabilities([0.9, 0.1])
    log_q = of_probabilities([0.5, 0.5])
    (score,) = token_scores(log_p, log_q, np.array([0]), floor=math.log(0.1))
    assert score["kl"] == pytest.approx(0.9 * math.log(0.9 / 0.5))


def test_a_token_that_the_base_rules_out_costs_nothing() -> None:
    log_p = log_softmax(np.float32([[0, -np.inf]]))
    log_q = log_softmax(np.float32([[0, -np.inf]]))
    assert token_scores(log_p, log_q, np.array([0]))["kl"] == [0]


@given(LOGITS)
def test_divergence_is_at_least_0_and_0_to_oneself(logits: np.ndarray) -> None:
    log_p, log_q = log_softmax(logits[0]), log_softmax(logits[1])
    targets = np.zeros(3, int)
    assert (token_scores(log_p, log_q, targets)["kl"] >= -1e-12).all()
    assert (token_scores(log_p, log_p, targets)["kl"] == 0).all()
    assert token_scores(log_p, log_p, targets)["same_top"].all()
    slow = [
        sum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True))
        for rows in zip(log_p, log_q, strict=True)
    ]
    assert token_scores(log_p, log_q, targets)["kl"] == pytest.approx(slow, abs=1e-9)


def random_scores(n_chunks: int, n_tokens: int, seed: int, scale: float = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = np.zeros((n_chunks, n_tokens), TOKEN_SCORES)
    scores["kl"] = scale * rng.exponential(0.01, scores.shape)
    scores["nll_base"] = rng.exponential(2, scores.shape)
    scores["nll"] = scores["nll_base"] + rng.normal(0.02, 0.1, scores.shape)
    scores["same_top"] = rng.random(scores.shape) < 0.9
    return scores


def test_a_text_the_slow_way() -> None:
    scores = random_scores(20, 31, seed=1)
    found = Divergence.of(scores)
    flat = scores.ravel()
    assert found.mean_kl.value == pytest.approx(flat["kl"].mean())
    assert found.perplexity.value == pytest.approx(math.exp(flat["nll"].mean()))
    change = math.exp(flat["nll"].mean()) - math.exp(flat["nll_base"].mean())
    assert found.perplexity_change.value == pytest.approx(change)
    ratio = (flat["nll"] - flat["nll_base"]).mean()
    assert found.ln_perplexity_ratio.value == pytest.approx(ratio)
    dp = np.exp(-flat["nll"]) - np.exp(-flat["nll_base"])
    assert found.rms_dp.value == pytest.approx(math.sqrt((dp**2).mean()))
    assert found.quantiles_kl["p99"] == pytest.approx(np.quantile(flat["kl"], 0.99))
    assert (found.n_chunks, found.n_scored) == (20, 620)
    # llama-perplexity's: sqrt((mean of squares - mean²) / (n - 1))
    binomial = math.sqrt(found.same_top.value * (1 - found.same_top.value) / 619)
    assert found.same_top.token_error == pytest.approx(binomial)


def test_chunks_and_tokens_agree_on_errors_where_tokens_are_independent() -> None:
    found = Divergence.of(random_scores(200, 31, seed=2))
    for name in ("mean_kl", "same_top", "perplexity", "ln_perplexity_ratio", "rms_dp"):
        estimate = getattr(found, name)
        # 200 chunks know their own spread to 5 %; three times that
        assert estimate.error == pytest.approx(estimate.token_error, rel=0.15), name


def test_tokens_that_go_together_widen_the_error_over_chunks() -> None:
    scores = random_scores(100, 31, seed=3)
    scores["kl"] = scores["kl"][:, :1]  # all tokens of a chunk alike
    found = Divergence.of(scores)
    assert found.mean_kl.error / found.mean_kl.token_error == pytest.approx(31**0.5, rel=0.2)


def test_one_chunk_has_no_error_over_chunks() -> None:
    found = Divergence.of(random_scores(1, 31, seed=4))
    assert math.isnan(found.mean_kl.error)
    assert found.mean_kl.token_error > 0


def test_drawing_chunks_spreads_a_mean_as_theory_says() -> None:
    means = np.random.default_rng(5).normal(3, 2, (12, 1))
    error = standard_errors(means, lambda m: m[..., 0])
    assert error == pytest.approx(means.std(ddof=1) / 12**0.5, rel=0.05)
    assert resampled(means).mean() == pytest.approx(means.mean(), abs=4 * float(error) / 4000**0.5)


def test_a_paired_difference_cancels_what_both_sides_share() -> None:
    rng = np.random.default_rng(6)
    hard = rng.exponential(1, (30, 1))
    both = np.concatenate([hard, hard + rng.normal(0.05, 0.01, hard.shape)], axis=1)
    found = paired(both, lambda m: m[..., 1] - m[..., 0])
    assert found.value == pytest.approx(0.05, abs=0.01)
    assert found.error < 0.01 < standard_errors(both, lambda m: m[..., 0])
    assert found.is_clear


def test_the_same_test_twice_is_no_difference() -> None:
    scores = random_scores(10, 31, seed=7)
    (found,) = paired_differences([scores, scores])
    assert all(d.value == d.low == d.high == 0 for d in found.values())
    assert not found["mean_kl"].is_clear


def test_a_ratio_of_divergences() -> None:
    scores = random_scores(40, 31, seed=8)
    lower = scores.copy()
    lower["kl"] *= 0.75
    (found,) = paired_differences([scores, lower])
    assert found["mean_kl_ratio"].value == pytest.approx(-0.25)
    assert found["mean_kl_ratio"].error == pytest.approx(0, abs=1e-12)


def test_one_chunk_shows_no_difference_clearly() -> None:
    (found,) = paired_differences([random_scores(1, 31, seed=s) for s in (9, 10)])
    assert not found["mean_kl"].is_clear


@pytest.mark.parametrize("n_chunks", [8, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(n_chunks: int) -> None:
    """300 texts of lognormal chunk means (as divergences are): 95 % should, give or take what so
    few chunks allow."""
    rng = np.random.default_rng(11)
    truth = math.exp(0.4**2 / 2)
    held = 0
    for _ in range(300):
        means = rng.lognormal(0, 0.4, (n_chunks, 1))
        found = paired(means, lambda m: m[..., 0])
        held += found.low <= truth <= found.high
    assert held / 300 >= (0.88 if n_chunks == 8 else 0.92)
