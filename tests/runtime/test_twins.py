"""Several requests with one prompt: computed once, its last block copied, each goes on alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from martlet.runtime.engine import Engine
from martlet.runtime.sampling_params import SamplingParams

from .harness import Answer, ask, engine_of, run_all
from .scripted import ScriptedExecutor, ScriptedTokenizer, hashed_logits

BLOCK = 4
EXECUTOR: dict[str, Any] = {"block_tokens": BLOCK, "n_blocks": 200}


def rows_of(executor: ScriptedExecutor) -> int:
    return sum(step.n_rows for step in executor.steps)


def alone(prompt: list[int], seed: int, **params: Any) -> list[int]:
    engine, _ = engine_of(hashed_logits(), executor=EXECUTOR)
    answer = ask(engine, prompt, seed=seed, temperature=0.9, **params)
    run_all(engine)
    return answer.ids


@pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5, 8, 18, 19, 20, 21])
def test_all_but_the_last_token_is_computed_once(n_prompt: int) -> None:
    prompt = list(range(n_prompt))
    params: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    engine, executor = engine_of(hashed_logits(), executor=EXECUTOR)
    answers = [ask(engine, prompt, seed=i, temperature=0.9, **params) for i in range(8)]
    run_all(engine)
    assert rows_of(executor) == n_prompt + 7 + 8 * 5
    assert [a.ids for a in answers] == [alone(prompt, i, **params) for i in range(8)]
    assert [a.finish.n_cached for a in answers] == [0] + [n_prompt - 1] * 7


def test_one_that_comes_later_copies_what_was_written_on() -> None:
    """The first one has its own output in that block by then, and goes on in the next."""
    engine, executor = engine_of(hashed_logits(), executor=EXECUTOR)
    params: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    prompt = list(range(10))
    first = ask(engine, prompt, seed=1, temperature=0.9, **params)
    for _ in range(7):
        engine.step()
    later = ask(engine, prompt, seed=2, temperature=0.9, **params)
    run_all(engine)
    assert rows_of(executor) == 10 + 11 + 1 + 11
    assert [first.ids, later.ids] == [alone(prompt, seed, **params) for seed in (1, 2)]


def test_other_salts_and_requests_that_bypass_the_cache_are_no_twins() -> None:
    for options in ({"cache_salt": b"x"}, {"reads_cache": False}):
        engine, executor = engine_of(hashed_logits(), executor=EXECUTOR)
        ask(engine, [1] * 7, max_tokens=4, ignore_eos=True)
        answer = Answer()
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.submit([1] * 7, params, answer, **options)
        run_all(engine)
        assert answer.finish.n_cached == 0
        assert rows_of(executor) == 2 * (7 + 3)


def test_a_twin_goes_on_alone_when_the_first_one_ends() -> None:
    engine, _ = engine_of(hashed_logits(), executor=EXECUTOR, step_rows=6)
    first = ask(engine, [1] * 15, request_id="first")
    later = ask(engine, [1] * 15, max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.stats().running == 1
    engine.cancel("first")
    run_all(engine)
    assert first.finish.reason == "cancelled"
    assert (later.finish.n_output, later.finish.n_cached) == (2, 4)


# ---- whatever happens ----------------------------------------------------------------------------


@cache
def solo(prompt: tuple[int, ...], seed: int) -> list[int]:
    return alone(list(prompt), seed, max_tokens=9, ignore_eos=True)


@given(
    visits=st.lists(
        st.tuples(
            st.integers(1, 14), st.integers(0, 3), st.integers(0, 9), st.sampled_from([None, 2, 5])
        ),
        min_size=2,
        max_size=10,
    ),
    step_rows=st.integers(1, 12),
    n_blocks=st.integers(7, 14),
    window=st.sampled_from([0, 1, 5]),
)
@settings(max_examples=150, deadline=None)
def test_twins_say_what_they_would_say_alone(
    visits: list[tuple[int, int, int, int | None]], step_rows: int, n_blocks: int, window: int
) -> None:
    """Prompts of few lengths, so that most have twins; small pools, cancelled leaders, windows."""
    executor = {"block_tokens": BLOCK, "n_blocks": n_blocks, "window": window}
    executor["n_window_blocks"] = min(n_blocks, 4 + step_rows)
    engine, scripted = engine_of(
        hashed_logits(), context=28, step_rows=step_rows, executor=executor, max_running=6
    )
    n_copied = 0
    copy_block = scripted.copy_block

    def counting(*arguments: Any) -> None:
        nonlocal n_copied
        n_copied += 1
        copy_block(*arguments)

    scripted.copy_block = counting  # type: ignore[method-assign]
    answers = [Answer() for _ in visits]
    for now in range(12):
        for i, (length, seed, arrives_at, cancelled_at) in enumerate(visits):
            if arrives_at == now:
                params = SamplingParams(temperature=0.9, seed=seed, max_tokens=9, ignore_eos=True)
                engine.submit([1] * length, params, answers[i], request_id=str(i))
            if cancelled_at == now:
                engine.cancel(str(i))
        engine.step()
        engine.scheduler.check()
    run_all(engine)
    event(f"copied {n_copied > 0}, preempted {engine.stats().preemptions > 0}")
    assert engine.stats().finished["error"] == 0
    for (length, seed, _, _), answer in zip(visits, answers, strict=True):
        expected = solo((1,) * length, seed)
        if answer.finish.reason == "cancelled":
            assert answer.ids == expected[: len(answer.ids)]
        else:
            assert answer.ids == expected


def test_the_copy_has_the_same_bits() -> None:
    """Over the native executor, windows included: logits of twins are those of a solo run."""
    native = pytest.importorskip("tests.runtime.test_engine_native")
    prompt = tuple(native.SYSTEM[:37])
    for arch in ("llama", "gemma3"):
        for n_window_blocks in (None, 18):
            executor = native.executor_of(arch, native.KvType.Q8_0, 24, 2, n_window_blocks)
            engine = Engine(executor, ScriptedTokenizer(eog_ids=()), context=native.CONTEXT)
            seen = native.recorded(engine)
            for name in "abcd":
                native.submit(engine, name, prompt)
            run_all(engine)
            assert engine.stats().tokens_cached == 3 * 36
            expected = native.solo(arch, native.KvType.Q8_0, prompt)
            assert [seen[name] for name in "abcd"] == [expected] * 4
            engine.close()
            executor.close()
