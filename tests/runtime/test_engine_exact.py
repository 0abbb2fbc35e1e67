"""The answer depends on the request alone: preemption, prefix reuse, neighbours, chunks, seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from martlet.runtime.sampling import SamplingParams

from .harness import Answer, ask, engine_of, run_all
from .scripted import VOCAB_SIZE, hashed, hashed_logits

PROMPT = list(b"prompt")


# ---- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_preempted_requests_say_what_they_would_have_said_alone(prefix_reuse: bool) -> None:
    """B94 (b) and B106: six blocks each, ten in the pool."""
    prompts = [[7] * 8, [8] * 8]
    params: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True}
    pool = {"block_tokens": 4, "n_blocks": 10}
    alone = []
    for prompt in prompts:
        engine, _ = engine_of(hashed_logits(), executor=pool)
        alone.append(ask(engine, prompt, **params))
        run_all(engine)
    engine, _ = engine_of(hashed_logits(), executor=pool, prefix_reuse=prefix_reuse)
    together = [ask(engine, prompt, **params) for prompt in prompts]
    run_all(engine)
    stats = engine.stats()
    assert 1 <= stats.preemptions <= 2
    assert [a.ids for a in together] == [a.ids for a in alone]
    assert stats.tokens_prefilled == 16
    assert stats.tokens_recomputed > 0
    assert stats.tokens_decoded == 32


def test_recomputed_rows_are_counted_apart_from_the_prompt() -> None:
    engine, _ = engine_of(step_rows=4, prefix_reuse=False)
    ask(engine, [1] * 7, max_tokens=9, request_id="a")
    for _ in range(6):
        engine.step()
    (request,) = engine.scheduler.running
    assert (request.n_computed, request.n_tokens) == (11, 12)
    engine.scheduler._preempt(request)
    run_all(engine)
    stats = engine.stats()
    assert (stats.tokens_prefilled, stats.tokens_recomputed, stats.tokens_decoded) == (7, 11, 9)


# ---- prefix reuse --------------------------------------------------------------------------------


def test_a_repeated_and_a_growing_prompt_compute_only_the_new_tail() -> None:
    """B96"""
    engine, _ = engine_of(context=512)
    prompt = [i % 250 for i in range(220)]
    n_cached = []
    for n_prompt in (100, 100, 120, 140, 160, 220):
        answer = ask(engine, prompt[:n_prompt], max_tokens=1)
        run_all(engine)
        n_cached.append(answer.finish.n_cached)
    assert n_cached == [0, 96, 96, 112, 128, 160]
    stats = engine.stats()
    assert stats.tokens_cached == sum(n_cached)
    assert stats.tokens_prefilled == 100 + 100 + 120 + 140 + 160 + 220 - sum(n_cached)


def test_an_answer_is_reused_when_it_comes_back_in_the_next_turn() -> None:
    engine, _ = engine_of(hashed(250), context=512)
    first = ask(engine, [1] * 20, max_tokens=30)
    run_all(engine)
    second = ask(engine, [1] * 20 + first.ids + [2] * 5, max_tokens=1)
    run_all(engine)
    assert second.finish.n_cached == 48


def test_salts_do_not_share_and_reuse_can_be_switched_off() -> None:
    """B98"""
    engine, _ = engine_of()
    answers = [Answer() for _ in range(3)]
    for answer, salt in zip(answers, (b"a", b"b", b"a"), strict=True):
        engine.submit([1] * 40, SamplingParams(max_tokens=1), answer, cache_salt=salt)
        run_all(engine)
    assert [a.finish.n_cached for a in answers] == [0, 0, 32]
    engine, _ = engine_of(prefix_reuse=False)
    for _ in range(2):
        answer = ask(engine, [1] * 40, max_tokens=1)
        run_all(engine)
        assert answer.finish.n_cached == 0


def test_chats_with_a_common_beginning_keep_their_own_answers() -> None:
    """B100: 32 at once, each with its marker, several rounds over one engine."""
    system = [9] * 37
    prompts = [[*system, 100 + i, 3, 3] for i in range(32)]
    alone = []
    for prompt in prompts:
        engine, _ = engine_of(hashed(250), context=128)
        alone.append(ask(engine, prompt, max_tokens=20))
        run_all(engine)
    engine, _ = engine_of(hashed(250), context=128, executor={"n_blocks": 60})
    for _ in range(3):
        answers = [ask(engine, prompt, max_tokens=20) for prompt in prompts]
        run_all(engine)
        assert [a.ids for a in answers] == [a.ids for a in alone]
    assert engine.stats().tokens_cached > 0


# ---- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbour_seed", [None, 5])
def test_a_seeded_request_is_the_same_with_any_neighbour(neighbour_seed: int | None) -> None:
    """B106"""
    params: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 20}
    engine, _ = engine_of(hashed_logits())
    alone = ask(engine, PROMPT, **params)
    run_all(engine)
    engine, _ = engine_of(hashed_logits())
    neighbour = ask(engine, [1, 2, 3], temperature=0.8, seed=neighbour_seed, max_tokens=30)
    for _ in range(4):
        engine.step()
    joined = ask(engine, PROMPT, **params)
    run_all(engine)
    assert joined.ids == alone.ids
    assert neighbour.finish.n_output == 30 or neighbour.finish.reason == "stop"


def test_the_reported_seed_reproduces_an_unseeded_run() -> None:
    """B108; two unseeded runs differ, so the seed does matter."""
    engine, _ = engine_of(hashed_logits(0.5), eog_ids=())
    free, other = (ask(engine, PROMPT, temperature=1.0, max_tokens=30) for _ in range(2))
    run_all(engine)
    again = ask(engine, PROMPT, temperature=1.0, max_tokens=30, seed=free.finish.seed)
    run_all(engine)
    assert again.ids == free.ids
    assert other.ids != free.ids
    assert free.finish.seed < 2**53


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1, 2**64 - 1])
def test_given_seeds_are_reported_as_given(seed: int) -> None:
    engine, _ = engine_of(hashed_logits())
    answers = [ask(engine, PROMPT, temperature=1.0, max_tokens=8, seed=seed) for _ in range(2)]
    run_all(engine)
    assert answers[0].ids == answers[1].ids
    assert answers[0].finish.seed == seed


def test_padding_entries_of_the_logits_are_never_drawn() -> None:
    engine, _ = engine_of(lambda history: np.zeros(VOCAB_SIZE, np.float32), eog_ids=())
    answer = ask(engine, PROMPT, temperature=1.0, max_tokens=40, logprobs=3)
    run_all(engine)
    assert max(answer.ids) < VOCAB_SIZE
    assert answer.tokens[0].logprob
    assert answer.tokens[0].logprob.logprob == pytest.approx(-math.log(VOCAB_SIZE))
