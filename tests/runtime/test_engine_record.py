"""The record of a request adds up whatever happened to it, and many requests leave nothing."""

from __future__ import annotations

import gc
import random
import tracemalloc

from martlet.runtime.events import FinishEvent
from martlet.runtime.sampling import SamplingParams

from .harness import ask, engine_of, run_all
from .scripted import hashed


def check_sums(end: FinishEvent) -> None:
    times = end.timings
    assert min(times.queue_ms, times.prefill_ms, times.decode_ms) >= 0
    total = times.queue_ms + times.prefill_ms + times.decode_ms
    assert abs(total - times.end_to_end_ms) < 1.0


def test_chunks_and_cached_tokens_are_in_the_record() -> None:
    engine, _ = engine_of(hashed(250), context=256, step_rows=20)
    cold = ask(engine, [1] * 100, max_tokens=2)
    run_all(engine)
    warm = ask(engine, [1] * 100, max_tokens=2)
    run_all(engine)
    assert (cold.finish.n_cached, cold.finish.trace.n_prefill_steps) == (0, 5)
    assert (warm.finish.n_cached, warm.finish.trace.n_prefill_steps) == (96, 1)
    assert warm.finish.trace.miss is None
    for answer in (cold, warm):
        check_sums(answer.finish)
        assert answer.finish.n_prompt == 100


def test_a_preempted_request_says_what_was_computed_again() -> None:
    engine, _ = engine_of(
        hashed(250), prefix_reuse=False, executor={"block_tokens": 4, "n_blocks": 10}
    )
    answers = [ask(engine, [i] * 8, max_tokens=16) for i in range(2)]
    run_all(engine)
    kept, lost = (answer.finish for answer in answers)
    assert (kept.trace.n_preempted, kept.trace.n_recomputed) == (0, 0)
    assert lost.trace.n_preempted >= 1
    assert lost.trace.n_recomputed == engine.stats().tokens_recomputed > 0
    for end in (kept, lost):
        check_sums(end)
    assert lost.timings.decode_ms > kept.timings.decode_ms, "it waited inside its phase"


def test_a_request_that_was_never_scheduled_has_only_a_queue() -> None:
    engine, _ = engine_of(max_running=1)
    ask(engine, [1], max_tokens=3)
    queued = ask(engine, [2], request_id="queued")
    engine.step()
    engine.cancel("queued")
    run_all(engine)
    check_sums(queued.finish)
    assert queued.finish.timings.queue_ms == queued.finish.timings.end_to_end_ms
    assert queued.finish.trace.n_prefill_steps == 0


def serve_randomly(n_requests: int, seed: int) -> tuple[int, dict[str, int]]:
    """Requests of random shapes, some cancelled; growth in bytes after the first quarter."""
    draw = random.Random(seed)
    engine, executor = engine_of(
        hashed(200), context=64, max_queue=1000, executor={"block_tokens": 4, "n_blocks": 40}
    )
    n_before = 0
    for i in range(n_requests):
        prompt = [1] * draw.randrange(20) + [draw.randrange(200) for _ in range(1 + i % 20)]
        params = SamplingParams(max_tokens=draw.randrange(1, 6), seed=i)
        service = draw.choice(("interactive", "background"))
        engine.submit(prompt, params, lambda event: None, request_id=str(i), service=service)
        if draw.random() < 0.2:
            engine.cancel(str(draw.randrange(i + 1)))
        for _ in range(draw.randrange(8)):
            engine.step()
            executor.steps.clear()
        if i == n_requests // 4:
            run_all(engine)
            gc.collect()
            n_before = tracemalloc.get_traced_memory()[0]
    run_all(engine)
    executor.steps.clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - n_before, dict(engine.stats().finished)


def test_two_thousand_requests_leave_nothing_behind() -> None:
    tracemalloc.start()
    try:
        n_grown, finished = serve_randomly(2000, seed=1)
    finally:
        tracemalloc.stop()
    assert sum(finished.values()) == 2000, "every request ended with a reason"
    assert finished["cancelled"] > 0
    assert finished["error"] == 0
    assert n_grown < 200_000, "less than 150 bytes a request"
