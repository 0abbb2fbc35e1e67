"""The chain on numbers a person can check, its ranges, and its independence of everything else."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime import sampling
from martlet.runtime.constraint import allowed_of, flags_of, is_allowed
from martlet.runtime.errors import ModelError, RequestError
from martlet.runtime.sampling import NUMPY, SamplingParams, keyed_uniform, sample, token_logprob

HUGE = pytest.param(10**5000, id="huge")
NO_TOKENS = np.array([0], np.int32)  # a prompt of one token, no output


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def weights_of(logits: np.ndarray) -> np.ndarray:
    return sampling.weights_of(logits, float(logits.max()))


def draws(logits: np.ndarray, n: int = 1000, **params: Any) -> set[int]:
    chosen = SamplingParams(**params)
    return {sample(logits, chosen, seed=seed, n_prompt=1, tokens=NO_TOKENS) for seed in range(n)}


def pick(logits: np.ndarray, tokens: list[int], n_prompt: int, **params: Any) -> int:
    chosen = SamplingParams(temperature=0, **params)
    return sample(logits, chosen, seed=0, n_prompt=n_prompt, tokens=np.array(tokens, np.int32))


# ---- filters -------------------------------------------------------------------------------------


def test_off_values_let_all_of_eight_equal_tokens_occur() -> None:
    assert draws(np.zeros(8, np.float32)) == set(range(8))
    assert draws(np.zeros(8, np.float32), top_k=0, top_p=1.0, min_p=0.0) == set(range(8))


def test_top_k_larger_than_the_vocabulary_changes_nothing() -> None:
    assert draws(np.zeros(8, np.float32), top_k=100) == set(range(8))


def test_top_k_keeps_the_lower_ids_among_equals() -> None:
    assert draws(np.zeros(8, np.float32), top_k=3) == {0, 1, 2}
    assert draws(np.array([0, 1, 0, 2, 0], np.float32), top_k=3) == {0, 1, 3}


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    places = sampling.top_p_places(weights_of(logits_of(0.5, 0.4, 0.1)), 0.6)
    assert places is not None
    assert places.tolist() == [0, 1]


def test_top_p_zero_and_min_p_one_leave_only_the_best() -> None:
    assert draws(logits_of(0.3, 0.4, 0.3), top_p=0.0) == {1}
    assert draws(logits_of(0.3, 0.4, 0.3), min_p=1.0) == {1}


def test_min_p_keeps_what_is_at_least_that_share_of_the_best() -> None:
    places = sampling.min_p_places(weights_of(logits_of(0.6, 0.29, 0.11)), 0.2)
    assert places is not None
    assert places.tolist() == [0, 1]


@given(
    st.integers(1, 40_000),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
    st.floats(0, 1),
    st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_filters_equal_a_full_sort(n: int, seed: int, k: int, p: float, n_levels: int) -> None:
    # Few levels make many ties, which is where partial selection could differ from sorting.
    logits = np.random.default_rng(seed).integers(0, n_levels, n).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    places = sampling.top_k_places(logits, k)
    assert (np.arange(n) if places is None else places).tolist() == sorted(order[:k])
    places = sampling.top_p_places(weights_of(logits), p)
    if places is None:
        assert p == 1.0
        return
    weights = np.exp(logits - logits.max()).astype(np.float64)
    assert set(places) == set(order[: len(places)]), "kept tokens must be the best ones"
    needed, slack = p * weights.sum(), 1e-9 * weights.sum()
    assert weights[places].sum() >= needed - slack, "too few"
    assert weights[order[: len(places) - 1]].sum() <= needed + slack, "one too many"


@given(st.integers(1, 20_000), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_draw_among_many_equals_adding_up_one_by_one(n: int, seed: int, uniform: float) -> None:
    # Multiples of 1/16 add up exactly, in any order; many are 0, and those are never drawn.
    weights = np.random.default_rng(seed).integers(0, 17, n).clip(0, 12).astype(np.float32) / 16
    weights[n // 2] = 1.0
    shares = np.cumsum(weights, dtype=np.float64)
    place = sampling.draw(weights, uniform)
    assert weights[place] > 0
    assert place == np.searchsorted(shares, uniform * shares[-1], side="right")


@pytest.mark.parametrize("p", [0.0, 0.3, 0.95, 0.999999])
def test_the_nucleus_of_a_nearly_flat_vocabulary_is_exact(p: float) -> None:
    logits = np.random.default_rng(3).normal(0, 0.05, 262_144).astype(np.float32)
    weights = weights_of(logits)
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order], dtype=np.float64)
    n_kept = int(np.searchsorted(shares, p * shares[-1])) + 1
    assert sampling.top_p_places(weights, p).tolist() == sorted(order[:n_kept])


# ---- temperature and greedy ----------------------------------------------------------------------


def test_temperature_zero_takes_the_best_and_the_lower_id_among_equals() -> None:
    assert pick(np.array([0, 3, 1, 3], np.float32), [0], 1) == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 2e-5, 1e-3])
def test_tiny_temperatures_draw_the_best_without_overflow(temperature: float) -> None:
    with np.errstate(invalid="raise", over="raise", divide="raise"):
        assert draws(np.array([-50, 90, 20], np.float32), 20, temperature=temperature) == {1}


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    n, temperature = 20_000, 2.0
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    expected = np.exp(logits / temperature)
    expected = n * expected / expected.sum()
    params = SamplingParams(temperature=temperature)
    drawn = [sample(logits, params, seed=s, n_prompt=1, tokens=NO_TOKENS) for s in range(n)]
    chi2 = ((np.bincount(drawn, minlength=4) - expected) ** 2 / expected).sum()
    assert chi2 < 16.3, "chi-squared with 3 degrees of freedom, p = 0.001"


def test_logits_with_nan_or_without_any_choice_are_an_error() -> None:
    for bad in ([0.0, math.nan], [-math.inf, -math.inf], [0.0, math.inf]):
        with pytest.raises(ModelError):
            pick(np.array(bad, np.float32), [0], 1)


# ---- adjustments ---------------------------------------------------------------------------------


def test_mask_comes_first_and_bias_cannot_bring_a_token_back() -> None:
    params = SamplingParams(temperature=0, logit_bias={1: 100.0})
    allowed = allowed_of(np.array([True, False, True]))
    logits = np.array([0, 5, 1], np.float32)
    token = sample(logits, params, seed=0, n_prompt=1, tokens=NO_TOKENS, allowed=allowed)
    assert token == 2


def test_logit_bias_is_added_and_leaves_the_input_alone() -> None:
    logits = np.array([0, 5, 1], np.float32)
    assert pick(logits, [0], 1, logit_bias={0: 6.0}) == 0
    assert pick(logits, [0], 1, logit_bias={1: -100.0}) == 2
    assert logits.tolist() == [0, 5, 1]


def test_a_bias_on_every_token_costs_one_pass_per_token() -> None:
    n_tokens = 100_000
    bias = {i: -1.0 for i in range(n_tokens)} | {7: 1.0}
    params = SamplingParams(temperature=0, logit_bias=bias)
    logits = np.zeros(n_tokens, np.float32)
    start = time.process_time()
    for _ in range(100):
        assert sample(logits, params, seed=0, n_prompt=0, tokens=NO_TOKENS) == 7
    assert time.process_time() - start < 2.0  # a loop over the ids takes more than twice as long


def test_presence_counts_once_and_frequency_each_time_over_the_output_only() -> None:
    output = np.array([1, 1, 1, 2], np.int32)
    logits = sampling.apply_count_penalties(np.zeros(4, np.float32), output, 0.5, 0.25)
    assert logits.tolist() == [0, -1.25, -0.75, 0]
    equal = np.zeros(2, np.float32)
    assert pick(equal, [0, 0], n_prompt=2, presence_penalty=2.0) == 0, "the prompt does not count"
    assert pick(equal, [0, 0], n_prompt=1, presence_penalty=2.0) == 1


def test_repetition_penalty_counts_the_prompt_and_lowers_both_signs() -> None:
    logits = np.array([2, -2, 4], np.float32)
    penalised = sampling.apply_repetition_penalty(logits, np.array([0, 1, 0], np.int32), 2.0)
    assert penalised.tolist() == [1, -4, 4]
    assert pick(np.array([2, 1.5], np.float32), [0], 1, repetition_penalty=2.0) == 1


# ---- random numbers ------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits, params = np.zeros(50, np.float32), SamplingParams()
    tokens = np.arange(8, dtype=np.int32)

    def at(position: int, seed: int) -> int:
        return sample(logits, params, seed=seed, n_prompt=1, tokens=tokens[: 1 + position])

    forwards = [at(i, 42) for i in range(7)]
    mixed = {i: (at(i, 7), at(i, 42))[1] for i in (3, 6, 0, 5, 1, 4, 2)}
    assert forwards == [mixed[i] for i in range(7)]
    assert len(set(forwards)) > 3
    assert forwards != [at(i, 43) for i in range(7)]


def test_the_position_is_that_in_the_output_whatever_the_prompt() -> None:
    logits, tokens = np.zeros(1000, np.float32), np.arange(9, dtype=np.int32)
    after = [
        sample(logits, SamplingParams(), seed=1, n_prompt=n, tokens=tokens[: n + 3])
        for n in (1, 2, 6)
    ]
    assert len(set(after)) == 1


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_a_stream_of_its_own(seed: int) -> None:
    SamplingParams(seed=seed)
    stream = [keyed_uniform(seed, i) for i in range(100)]
    others = [keyed_uniform(s, i) for s in (2, 2**53) for i in range(100)]
    assert all(0 <= u < 1 for u in stream)
    assert len(set(stream)) == 100
    assert not set(stream) & set(others)


def test_keyed_numbers_do_not_change_between_releases() -> None:
    # First word of Philox4x64-10 with key 42 and counter 1 (NumPy counts up before each use).
    assert keyed_uniform(42, 0) == 0.8201981478608876


# ---- logprobs ------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_model_best_first() -> None:
    result = token_logprob(logits_of(0.25, 0.5, 0.125, 0.125), 2, 3)
    assert result.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [i for i, _ in result.top] == [1, 0, 2]
    assert [math.exp(x) for _, x in result.top] == pytest.approx([0.5, 0.25, 0.125], abs=1e-6)


def test_logprobs_zero_reports_only_the_token_and_many_reports_all() -> None:
    assert token_logprob(logits_of(0.5, 0.5), 0, 0).top == ()
    assert len(token_logprob(logits_of(0.5, 0.5), 0, 20).top) == 2


# ---- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top_k", "seed", "max_tokens", "logprobs"])
@pytest.mark.parametrize("value", [-1, -(2**31), 2**64, 1e300, 1.0, True, "1", math.nan, HUGE])
def test_integers_out_of_range_or_of_another_type_are_refused_by_name(
    name: str, value: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name} is ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", None),
        pytest.param("temperature", 10**5000, id="temperature-huge"),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("min_p", 1.01),
        ("min_p", "0.5"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"1": 1.0}),
    ],
)
def test_other_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**32))
def test_a_mask_removes_what_is_not_allowed_and_nothing_else(
    n: int, share: float, key: int
) -> None:
    rng = np.random.default_rng(key)
    logits = rng.normal(size=n).astype(np.float32)
    before, flags = logits.copy(), rng.random(n) < share
    allowed = allowed_of(flags)
    assert (flags_of(allowed, n) == flags).all()
    assert [is_allowed(allowed, i) for i in range(n)] == flags.tolist()
    kept = np.where(flags, logits, -np.inf)
    assert (NUMPY.mask(logits, allowed) == kept).all()
    assert NUMPY.best(logits, allowed) == (int(kept.argmax()) if flags.any() else None)
    args: Any = {"seed": 1, "n_prompt": 1, "tokens": NO_TOKENS, "allowed": allowed}
    best_id = int(logits.argmax())
    for terms in ({}, {"temperature": 0}, {"temperature": 0, "logit_bias": {0: 9}}, {"top_k": 3}):
        params = SamplingParams(**terms)  # type: ignore[arg-type]
        if not flags.any():
            with pytest.raises(ModelError):
                sample(logits, params, **args)
            continue
        token_id = sample(logits, params, best_id=best_id, **args)
        assert token_id == sample(logits, params, **args)
        assert flags[token_id]
    assert (logits == before).all()
