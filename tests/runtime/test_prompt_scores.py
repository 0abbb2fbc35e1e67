"""Logprobs of the prompt's own tokens: exact, whoever shares the steps, within bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.errors import ContextTooLong, RequestError
from martlet.runtime.events import Event, FinishEvent, PromptEvent, TokenEvent, TokenLogprob
from martlet.runtime.prompt_scores import scored_rows
from martlet.runtime.sampling import SamplingParams, token_logprob

from .harness import Answer, ask, engine_of, run_all
from .scripted import VOCAB_SIZE, hashed_logits
from .tiny import run_tokens

PROMPT = [(7 * i) % 250 for i in range(50)]


class Scored(Answer):
    """An answer that begins with the scores of its prompt."""

    prompt: PromptEvent | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, PromptEvent):
            assert not self.tokens, "the prompt's scores come first"
            assert self.prompt is None, "and once"
            self.prompt = event
        else:
            super().__call__(event)

    @property
    def scores(self) -> tuple[TokenLogprob, ...]:
        assert self.prompt is not None
        return self.prompt.logprobs


def score(engine: Engine, prompt: Sequence[int] = PROMPT, n_top: int = 2, **params: Any) -> Scored:
    answer = Scored()
    params = {"max_tokens": 3, "temperature": 0.0, **params}
    engine.submit(prompt, SamplingParams(prompt_logprobs=n_top, **params), answer)
    return answer


def scored_alone(**options: Any) -> Scored:
    engine, _ = engine_of(hashed_logits(), context=128, **options)
    answer = score(engine)
    run_all(engine)
    return answer


def test_scores_are_the_log_softmax_of_the_logits_before_each_token() -> None:
    answer, script = scored_alone(), hashed_logits()
    assert len(answer.scores) == len(PROMPT) - 1
    for place, found in enumerate(answer.scores, 1):
        logits = np.asarray(script(np.array(PROMPT[:place], np.int32)), np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert found.logprob == pytest.approx(expected[PROMPT[place]], abs=1e-5)
        best = np.argsort(-expected, kind="stable")[:2]
        assert [token_id for token_id, _ in found.top] == best.tolist()
        assert found.rank == 1 + (expected > expected[PROMPT[place]]).sum()
    assert [type(e) for e in answer.tokens] == [TokenEvent] * 3


@pytest.mark.parametrize("step_rows", [1, 7, 64])
def test_neither_chunks_nor_neighbours_nor_known_prefixes_change_a_bit(step_rows: int) -> None:
    alone = scored_alone()
    engine, executor = engine_of(hashed_logits(), context=128, step_rows=step_rows)
    ask(engine, PROMPT, max_tokens=1)
    run_all(engine)  # the whole prompt is known now
    executor.steps.clear()
    beside = [ask(engine, [i] * 20, max_tokens=30, ignore_eos=True) for i in range(3)]
    answers = [score(engine) for _ in range(2)]
    run_all(engine)
    assert all(answer.scores == alone.scores and answer.ids == alone.ids for answer in answers)
    assert [answer.finish.n_cached for answer in answers] == [0, 0]
    miss = answers[0].finish.trace.miss
    assert miss is not None
    assert miss.reason == "bypassed"
    assert all(answer.finish.reason == "length" for answer in beside)


def test_rows_are_scored_once_though_preemption_computes_them_again() -> None:
    alone = scored_alone()
    engine, executor = engine_of(hashed_logits(), context=128, step_rows=16)
    answer = score(engine)
    engine.step()
    engine.step()
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    run_all(engine)
    assert answer.finish.trace.n_recomputed == 32
    assert answer.scores == alone.scores
    assert sum(step.n_out for step in executor.steps) == len(PROMPT) + 2


def test_requests_preempted_for_want_of_blocks_keep_their_scores() -> None:
    pool = {"block_tokens": 4, "n_blocks": 30}
    engine, _ = engine_of(hashed_logits(), context=100, executor=pool)
    other = score(engine, [3] * 40, max_tokens=50, ignore_eos=True)
    answer = score(engine, max_tokens=40, ignore_eos=True)
    run_all(engine)
    assert engine.stats().preemptions > 0
    assert answer.scores == scored_alone().scores
    assert len(other.scores) == 39


def test_a_step_reads_few_logits_and_streams_go_on_meanwhile() -> None:
    engine, executor = engine_of(hashed_logits(), context=128)
    engine.scheduler.scored_rows = 5
    stream = ask(engine, [1], max_tokens=60, ignore_eos=True)
    engine.step()
    answers = [score(engine) for _ in range(2)]
    run_all(engine)
    assert max(step.n_out for step in executor.steps) <= 5 + 3
    assert all(answer.scores == scored_alone().scores for answer in answers)
    assert stream.finish.n_output == 60


def test_the_bound_is_memory_not_rows() -> None:
    assert scored_rows(262_144) * 262_144 * 4 <= 64 << 20
    assert scored_rows(1 << 30) == 1


def test_a_prompt_may_be_scored_and_not_continued() -> None:
    engine, _ = engine_of(hashed_logits(), context=len(PROMPT))
    answer = score(engine, max_tokens=0)
    run_all(engine)
    assert answer.scores == scored_alone().scores
    assert answer.finish.reason == "length"
    assert (answer.finish.n_output, answer.text) == (0, "")
    assert answer.finish.timings.ttft_ms is None
    with pytest.raises(ContextTooLong):
        score(engine, [1] * (len(PROMPT) + 1), max_tokens=0)
    with pytest.raises(ContextTooLong):
        score(engine, max_tokens=1)
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_a_prompt_of_one_token_has_no_scores() -> None:
    engine, _ = engine_of(hashed_logits())
    answer = score(engine, [5])
    run_all(engine)
    assert answer.scores == ()


def test_logits_that_are_no_numbers_end_that_request_alone() -> None:
    def script(history: np.ndarray) -> np.ndarray:
        logits = np.zeros(VOCAB_SIZE, np.float32)
        logits[3] = np.nan if history[0] == 9 and len(history) == 2 else 1
        return logits

    engine, _ = engine_of(script)
    bad, good = score(engine, [9, 1, 1, 1]), score(engine, [8, 1, 1, 1])
    run_all(engine)
    assert bad.finish.reason == "error"
    assert "prompt token 2" in (bad.finish.error or "")
    assert len(good.scores) == 3


def test_native_scores_equal_those_of_its_logits() -> None:
    from .native_library import IS_SANITIZED  # skips where there is no native library
    from .test_engine_native import CONTEXT, KvType, executor_of

    assert IS_SANITIZED in (True, False)
    logits = run_tokens(executor_of("gemma3", KvType.F16, 32, 1), PROMPT, chunk=32)
    expected = [
        token_logprob(row, token_id, 2).logprob
        for row, token_id in zip(logits, PROMPT[1:], strict=False)
    ]
    for step_rows in (5, 32):
        executor = executor_of("gemma3", KvType.F16, 32, 2)
        tokenizer = engine_of()[0]._tokenizer
        engine = Engine(executor, tokenizer, context=CONTEXT, step_rows=step_rows)
        ask(engine, [4] * 20, max_tokens=9, ignore_eos=True)
        answers = [score(engine) for _ in range(3)]
        run_all(engine)
        for answer in answers:
            assert [found.logprob for found in answer.scores] == expected


def test_the_end_follows_the_scores() -> None:
    events: list[Event] = []
    engine, _ = engine_of(hashed_logits())
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    engine.submit([1, 2, 3], params, events.append)
    run_all(engine)
    first, last = events
    assert isinstance(first, PromptEvent)
    assert isinstance(last, FinishEvent)
