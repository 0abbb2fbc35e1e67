"""The engine with its thread: cancelling, sleeping, many callers, and what the stamps add up to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.errors import FileChanged, ModelError
from martlet.runtime.events import Event, FinishEvent
from martlet.runtime.latency import Timings
from martlet.runtime.sampling import SamplingParams

from ..server.serving import wait_until
from .harness import Answer, ask, engine_of, run_all
from .scripted import VOCAB_SIZE, ScriptedExecutor, reply_text

PROMPT = list(b"prompt")
WORD = VOCAB_SIZE - 1  # an id the default script never draws
LONG_S = 30.0  # how long a test waits for something that takes milliseconds


class Awaited(Answer):
    """An answer another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.done = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        (self.done if isinstance(event, FinishEvent) else self.first).set()


@contextmanager
def started(**options: Any) -> Iterator[tuple[Engine, ScriptedExecutor]]:
    engine, executor = engine_of(**options)
    engine.start()
    try:
        yield engine, executor
    finally:
        engine.close()


def submit(
    engine: Engine, prompt: list[int], request_id: str | None = None, **params: Any
) -> Awaited:
    answer = Awaited()
    params.setdefault("temperature", 0.0)
    engine.submit(prompt, SamplingParams(**params), answer, request_id=request_id)
    return answer


# ---- cancelling ----------------------------------------------------------------------------------


def test_cancelled_in_prefill_at_most_one_more_chunk_runs() -> None:
    """B88 (a): twenty chunks, cancelled after two."""
    engine, executor = engine_of(context=512, step_rows=20)
    answer = ask(engine, [1] * 400, request_id="long")
    engine.step()
    engine.step()
    engine.cancel("long")
    run_all(engine)
    assert len(executor.steps) == 2
    assert (answer.finish.reason, answer.finish.n_output) == ("cancelled", 0)
    assert answer.finish.timings.ttft_ms is None


def test_cancelled_while_queued_it_never_starts() -> None:
    """B88 (b)"""
    engine, executor = engine_of(max_running=1)
    ask(engine, [1, 1], max_tokens=3)
    queued = ask(engine, [WORD, WORD], request_id="queued")
    engine.step()
    engine.cancel("queued")
    run_all(engine)
    assert queued.finish.reason == "cancelled"
    assert all(WORD not in step.tokens for step in executor.steps)
    assert queued.finish.timings.prefill_ms == queued.finish.timings.decode_ms == 0


def test_cancelled_in_decode_the_held_text_is_given_and_the_blocks_are_free() -> None:
    engine, _ = engine_of(reply_text("one END"))
    answer = ask(engine, PROMPT, request_id="a", stop=("END",))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("unknown")
    run_all(engine)
    assert (answer.text, answer.finish.reason) == ("one E", "cancelled")
    engine.cancel("a")
    run_all(engine)


def test_the_same_prompt_again_right_after_cancelling_it() -> None:
    """B90, 200 times."""
    with started(max_queue=1000) as (engine, _):
        expected = None
        for i in range(200):
            cancelled = submit(engine, PROMPT, f"c{i}")
            cancelled.first.wait(LONG_S)
            engine.cancel(f"c{i}")
            again = submit(engine, PROMPT, max_tokens=10)
            assert again.done.wait(LONG_S)
            assert cancelled.done.wait(LONG_S)
            expected = expected or again.ids
            assert again.ids == expected
        assert engine.stats().blocks_used == 0


def test_an_owner_may_cancel_from_its_own_event() -> None:
    engine, _ = engine_of()
    answer = Answer()

    def owner(event: Event) -> None:
        answer(event)
        engine.cancel("mine")

    engine.submit(PROMPT, SamplingParams(), owner, request_id="mine")
    run_all(engine)
    assert (answer.finish.reason, answer.finish.n_output) == ("cancelled", 1)


# ---- the thread ----------------------------------------------------------------------------------


def test_many_callers_get_their_own_answers() -> None:
    prompts = [[i + 1] * (i + 3) for i in range(16)]
    engine, _ = engine_of()
    alone = []
    for prompt in prompts:
        alone.append(ask(engine, prompt, max_tokens=12))
        run_all(engine)
    answers: dict[int, Awaited] = {}
    with started(executor={"block_tokens": 4, "n_blocks": 30}, max_queue=100) as (engine, _):

        def caller(i: int) -> None:
            answers[i] = submit(engine, prompts[i], max_tokens=12)

        threads = [threading.Thread(target=caller, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(answer.done.wait(LONG_S) for answer in answers.values())
    assert [answers[i].ids for i in range(16)] == [a.ids for a in alone]


def test_an_idle_engine_sleeps() -> None:
    """B116: before any request and after one."""
    with started() as (engine, executor):
        for _ in range(2):
            time.sleep(0.1)
            n_steps, cpu = len(executor.steps), time.process_time()
            time.sleep(0.5)
            assert time.process_time() - cpu < 0.1, "a spinning thread would use 0.5 s"
            assert len(executor.steps) == n_steps
            assert submit(engine, PROMPT, max_tokens=2).done.wait(LONG_S)


def test_b116_a_request_to_an_idle_engine_starts_at_once() -> None:
    with started() as (engine, _):
        first_ms = []
        for _ in range(5):
            time.sleep(0.2)
            answer = submit(engine, PROMPT, max_tokens=1)
            assert answer.done.wait(LONG_S)
            first_ms.append(answer.finish.timings.ttft_ms or LONG_S)
        assert min(first_ms) < 50, "the others may have met a busy machine"


def test_close_ends_the_thread_and_every_request() -> None:
    engine, _ = engine_of(executor={"seconds_per_step": 0.01})
    engine.start()
    answers = [submit(engine, PROMPT, max_tokens=50) for _ in range(3)]
    assert answers[0].first.wait(LONG_S)
    engine.close()
    engine.close()
    assert all(answer.finish.reason == "cancelled" for answer in answers)
    assert "martlet-engine" not in [thread.name for thread in threading.enumerate()]


def test_the_thread_survives_an_executor_that_fails() -> None:
    with started() as (engine, executor):
        executor.fail_next = RuntimeError("no")
        bad = submit(engine, PROMPT)
        assert bad.done.wait(LONG_S)
        good = submit(engine, PROMPT, max_tokens=2)
        assert good.done.wait(LONG_S)
    assert (bad.finish.reason, good.finish.reason) == ("error", "length")


def test_a_bug_in_the_loop_leaves_nobody_waiting() -> None:
    with started() as (engine, _):
        schedule, calls = engine.scheduler.schedule, []

        def broken() -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise AssertionError("a bug")
            return schedule()

        engine.scheduler.schedule = broken  # type: ignore[method-assign]
        bad = submit(engine, PROMPT)
        assert bad.done.wait(LONG_S)
        assert bad.finish.error == "AssertionError: a bug"
        good = submit(engine, PROMPT, max_tokens=2)
        assert good.done.wait(LONG_S)
    assert good.finish.reason == "length"


@pytest.mark.parametrize("error", [SystemExit(), FileChanged("m.gguf was changed")])
def test_a_thread_that_ends_tells_all_who_wait(error: BaseException) -> None:
    """Those whose turn has not come as well, and those who ask afterwards."""
    with started(max_running=1, executor={"seconds_per_step": 0.05}) as (engine, executor):
        executor.fail_next = error
        answers = [submit(engine, PROMPT) for _ in range(3)]
        for answer in answers:
            assert answer.done.wait(LONG_S)
            assert answer.finish.reason == "error"
            assert (str(error) or type(error).__name__) in (answer.finish.error or "")
        wait_until(lambda: not engine.is_alive)
        with pytest.raises(ModelError, match="closed"):
            submit(engine, PROMPT)


# ---- timings -------------------------------------------------------------------------------------


def test_phases_are_differences_of_stamps_and_add_up_exactly() -> None:
    ms = 1_000_000
    timings = Timings.from_stamps(
        arrived=1 * ms, scheduled=3 * ms, first_token=10 * ms, end=40 * ms, n_output=4
    )
    assert (timings.queue_ms, timings.prefill_ms, timings.decode_ms) == (2, 7, 30)
    assert (timings.ttft_ms, timings.tpot_ms, timings.end_to_end_ms) == (9, 10, 39)


def test_phases_that_were_not_reached_are_zero() -> None:
    queued = Timings.from_stamps(arrived=0, scheduled=None, first_token=None, end=5, n_output=0)
    assert (queued.queue_ms, queued.prefill_ms, queued.decode_ms) == (5e-6, 0, 0)
    prefill = Timings.from_stamps(arrived=0, scheduled=2, first_token=None, end=5, n_output=0)
    assert (prefill.queue_ms, prefill.prefill_ms, prefill.decode_ms) == (2e-6, 3e-6, 0)
    one = Timings.from_stamps(arrived=0, scheduled=1, first_token=2, end=2, n_output=1)
    assert one.tpot_ms is None
    assert (queued.ttft_ms, prefill.ttft_ms) == (None, None)


def test_stamps_of_a_slow_model_fall_into_the_right_phases() -> None:
    step_ms = 20
    slow = {"seconds_per_step": step_ms / 1000}
    engine, _ = engine_of(executor=slow, max_running=1, step_rows=4)
    first, second = ask(engine, [1] * 8, max_tokens=3), ask(engine, [2] * 8, max_tokens=1)
    run_all(engine)
    times = first.finish.timings
    assert times.prefill_ms >= 2 * step_ms, "two chunks"
    assert times.decode_ms >= 2 * step_ms, "two more tokens"
    assert times.tpot_ms == times.decode_ms / 2
    waited = second.finish.timings
    assert waited.queue_ms >= 4 * step_ms, "it queued while the first one ran"
    assert waited.decode_ms == 0
    for timings in (times, waited):
        total = timings.queue_ms + timings.prefill_ms + timings.decode_ms
        assert total == timings.end_to_end_ms
    last = first.tokens[-1].time_ns - first.tokens[0].time_ns
    assert times.decode_ms == last / 1e6, "it ends with the last token"
