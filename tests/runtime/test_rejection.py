"""Guesses that stand by chance: what is said has the distribution it has without guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import erfc, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime.errors import RequestError
from martlet.runtime.rejection import Distribution, Guess, certain, settle
from martlet.runtime.sampling import SamplingParams, Use, keyed_uniform, sample, weighed
from martlet.runtime.speculation import Speculation

from .guessing import ChanceDrafter
from .harness import Answer, ask, engine_of, run_all
from .scripted import hashed_logits

N_DRAWS = 100_000
N_WORDS = 6
N_PLACES = 3  # two guesses and the token behind them


Text = tuple[int, ...]


def toy(seed: int, sharpness: float) -> dict[Text, Distribution]:
    """A language of six words: what follows every text of up to three."""
    rng = np.random.default_rng(seed)
    texts = [text for n in range(N_PLACES) for text in product(range(N_WORDS), repeat=n)]
    return {text: Distribution(None, rng.dirichlet(np.full(N_WORDS, sharpness))) for text in texts}


TARGET = toy(1, 1.0)
FAR = {  # and some words are never guessed
    text: Distribution(np.array([0, 1, 4, 5]), chances.weights[[5, 1, 3, 0]] ** 2)
    for text, chances in TARGET.items()
}
GUESSERS = {
    "always one word": {text: certain(sum(text) % N_WORDS) for text in TARGET},
    "far from it": FAR,
    "the same": TARGET,
}


def draws(chances: Distribution, numbers: np.ndarray) -> list[int]:
    """What Distribution.draw gives for each number."""
    shares = np.cumsum(chances.weights)
    places = np.searchsorted(shares, numbers * shares[-1], side="right")
    found = places if chances.ids is None else chances.ids[places]
    assert [chances.draw(number) for number in numbers[:20]] == found[:20].tolist()
    return found.tolist()


def spoken(guesser: dict[Text, Distribution], n_texts: int) -> list[Text]:
    """Texts with guesses of all places but the last; what is guessed behind a fallen one is not
    looked at."""
    numbers = np.random.default_rng(5).random((N_PLACES, 4, n_texts))
    guesses = {text: draws(q, numbers[len(text), Use.GUESS]) for text, q in guesser.items()}
    tokens = {text: draws(p, numbers[len(text), Use.TOKEN]) for text, p in TARGET.items()}
    coins, instead = numbers[:, Use.COIN].tolist(), numbers[:, Use.INSTEAD].tolist()
    texts: list[Text] = []
    for i in range(n_texts):
        text: Text = ()
        stands = True
        while stands and len(text) < N_PLACES - 1:
            at, guess = len(text), Guess(guesses[text][i], guesser[text])
            token = settle(guess, TARGET[text], coins[at][i], instead[at][i])
            text, stands = (*text, token), token == guess.token
        while len(text) < N_PLACES:
            text = (*text, tokens[text][i])
        texts.append(text)
    return texts


def chances_of(text: Text) -> float:
    return float(np.prod([TARGET[text[:n]].chance(text[n]) for n in range(N_PLACES)]))


def p_value(counts: Sequence[int], chances: Sequence[float]) -> float:
    """Of Pearson's chi-squared statistic, by the cube root of Wilson and Hilferty (1931)."""
    expected = np.array(chances) * sum(counts)
    assert expected.min() > 5
    free = len(counts) - 1
    statistic = float((((np.array(counts) - expected) ** 2) / expected).sum())
    z = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / sqrt(2 / (9 * free))
    return erfc(z / sqrt(2)) / 2


@pytest.mark.parametrize("name", GUESSERS)
def test_every_place_has_the_target_s_distribution(name: str) -> None:
    texts = spoken(GUESSERS[name], N_DRAWS)
    wanted = {text: chances_of(text) for text in product(range(N_WORDS), repeat=N_PLACES)}
    for at in range(N_PLACES):
        counts = Counter(text[at] for text in texts)
        chances = [sum(c for text, c in wanted.items() if text[at] == w) for w in range(N_WORDS)]
        assert p_value([counts[w] for w in range(N_WORDS)], chances) > 0.001
    pairs = Counter(text[:2] for text in texts)  # and one word given the other
    both = {
        pair: sum(c for text, c in wanted.items() if text[:2] == pair)
        for pair in product(range(N_WORDS), repeat=2)
    }
    often = [pair for pair, chance in both.items() if chance * N_DRAWS > 20]
    counts = [pairs[pair] for pair in often] + [N_DRAWS - sum(pairs[pair] for pair in often)]
    chances = [both[pair] for pair in often] + [1 - sum(both[pair] for pair in often)]
    if chances[-1] * N_DRAWS <= 5:
        counts, chances = counts[:-1], chances[:-1]
    assert p_value(counts, chances) > 0.001


def test_the_test_would_see_a_wrong_rule() -> None:
    """Drawing from p where the guess has fallen, not from what p has beyond q."""
    numbers = np.random.default_rng(5).random((N_DRAWS // 10, 3))
    p, q = TARGET[()], FAR[()]
    counts = Counter[int]()
    for draw, coin, instead in numbers:
        guess = q.draw(draw)
        counts[guess if coin * q.chance(guess) < p.chance(guess) else p.draw(instead)] += 1
    chances = [p.chance(word) for word in range(N_WORDS)]
    assert p_value([counts[word] for word in range(N_WORDS)], chances) < 1e-6


def test_guesses_stand_as_often_as_the_two_have_in_common() -> None:
    p, q = TARGET[()], FAR[()]
    numbers = np.random.default_rng(6).random((20_000, 3))
    guesses = [Guess(q.draw(draw), q) for draw in numbers[:, 0]]
    stood = [
        settle(guess, p, coin, instead) == guess.token
        for guess, (_, coin, instead) in zip(guesses, numbers, strict=True)
    ]
    common = sum(min(p.chance(w), q.chance(w)) for w in range(N_WORDS))
    assert np.mean(stood) == pytest.approx(common, abs=0.01)
    same = [settle(Guess(w, p), p, 1 - 2**-53, 0.5) for w in range(N_WORDS)]
    assert same == list(range(N_WORDS)), "a guess from the same distribution always stands"


def test_what_is_left_of_the_same_but_for_rounding_is_the_same() -> None:
    p = Distribution(None, np.array([0.5, 0.5]))
    assert p.without(p) is p
    assert p.without(certain(0)).draw(0.7) == 1
    assert p.chance(2) == 0.0
    assert Distribution(np.array([3, 7]), np.array([1.0, 3.0])).chance(7) == 0.75


def test_numbers_of_a_place_differ_by_use_and_the_first_is_what_it_was() -> None:
    words = np.random.Philox(key=9, counter=4).random_raw(4)
    found = [keyed_uniform(9, 4, use) for use in Use]
    assert found == [float(int(word) >> 11) * 2.0**-53 for word in words]
    assert keyed_uniform(9, 4) == found[0]
    assert len({keyed_uniform(9, at, use) for at in range(50) for use in Use}) == 200


@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    is_masked=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_weights_are_those_that_samples_are_drawn_from(
    logits: list[float], is_masked: bool, **terms: Any
) -> None:
    """At any seed the token is the one that its random number falls on."""
    row, params = np.array(logits, np.float32), SamplingParams(**terms)
    allowed = None
    if is_masked:
        allowed = np.array([0b1011_0110_1101_1011_0110_1101_1011_0110], np.uint32)
    asked: dict[str, Any] = {"n_prompt": 1, "tokens": np.array([1], np.int32), "allowed": allowed}
    weights, ids = weighed(row, params, **asked)
    chances = Distribution(ids, weights)
    for seed in range(5):
        token = sample(row, params, seed=seed, **asked)
        assert token == chances.draw(keyed_uniform(seed, 0))
        assert chances.chance(token) > 0


# ---- through the engine -------------------------------------------------------------------------


CHANCES = Distribution(np.arange(40), np.linspace(1, 3, 40))


def said(rule: str | None, told: str | None = None, **params: Any) -> list[int]:
    speculation = rule and Speculation(ChanceDrafter(CHANCES), length=3, rule=rule)
    engine, _ = engine_of(hashed_logits(0.5), context=96, speculation=speculation or None)
    answer = ask(
        engine, [1, 2, 3], max_tokens=60, seed=3, ignore_eos=True, speculate_rule=told, **params
    )
    run_all(engine)
    return answer.ids


def test_a_seed_repeats_a_run_and_greedy_texts_stay_the_same() -> None:
    plain = said(None, temperature=1.0)
    rejected = said("reject", temperature=1.0)
    assert rejected == said("reject", temperature=1.0)
    assert rejected != plain, "drawn by other random numbers"
    assert said("match", temperature=1.0) == plain
    assert said("reject", temperature=0.0) == said(None, temperature=0.0)


def test_a_request_can_choose_its_rule() -> None:
    plain, rejected = said(None, temperature=1.0), said("reject", temperature=1.0)
    assert said("match", "reject", temperature=1.0) == rejected
    assert said("reject", "match", temperature=1.0) == plain
    with pytest.raises(RequestError, match="speculate_rule is 'maybe'"):
        SamplingParams(speculate_rule="maybe")


def test_penalties_and_filters_are_part_of_what_is_said() -> None:
    """Nothing outside them is ever said, whatever is guessed."""
    ids = said("reject", temperature=1.0, top_k=1)
    assert ids == said(None, temperature=1.0, top_k=1)
    bias = {token: -100.0 for token in range(40)}
    assert min(said("reject", temperature=1.0, logit_bias=bias)) >= 40


def test_the_engine_s_texts_have_the_distribution_of_plain_ones() -> None:
    """The second token of 900 seeds, in 16 groups of equal chances by the script's logits."""
    counts = Counter[int]()
    speculation = Speculation(ChanceDrafter(CHANCES), length=1, rule="reject")
    script = hashed_logits(0.5)
    engine, _ = engine_of(script, context=96, speculation=speculation)
    answers: list[Answer] = []
    for seed in range(900):
        params: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "ignore_eos": True}
        answers.append(ask(engine, [5], seed=seed, **params))
        if seed % 30 == 29:  # nothing is guessed beside prompts
            run_all(engine)
    for seed, answer in enumerate(answers):
        history = np.array([5, answer.ids[0]], np.int32)
        weights = np.exp(np.asarray(script(history), np.float64))
        before = weights[: answer.ids[1]].sum() / weights.sum()
        share = weights[answer.ids[1]] / weights.sum()
        counts[int(16 * (before + share * keyed_uniform(seed, 99)))] += 1
    assert p_value([counts[i] for i in range(16)], [1 / 16] * 16) > 0.001
    assert speculation.counts.drafted == 900
    assert speculation.counts.accepted > 20
