"""Two classes of service and deadlines: who goes first, that nobody starves, how lateness ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import RequestError
from martlet.runtime.request import State
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.service import EVERY, SERVICES, Line, Service

from .harness import Answer, engine_of, run_all
from .scripted import hashed
from .test_scheduler import request_of, run, scheduler_of

INTERACTIVE, BACKGROUND = SERVICES


def serve(
    engine: Any, prompt: list[int], service: Service, request_id: str | None = None, **options: Any
) -> Answer:
    answer, params = Answer(), SamplingParams(temperature=0.0, max_tokens=options.pop("n", 1))
    engine.submit(prompt, params, answer, request_id=request_id, service=service, **options)
    return answer


# ---- places --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*SERVICES, None]), max_size=200))
def test_the_line_is_fair_whatever_arrives_and_leaves(moves: list[Service | None]) -> None:
    """None serves the first in line. Bounds of service.py, and order inside a class."""
    line, waiting, passed, ahead = Line(), [], {}, {}
    for arrival, move in enumerate(moves):
        if move:
            place = line.place(move, arrival)
            ahead[place] = sum(p.rank == place.rank for p in waiting)
            passed[place] = 0
            assert all(p < place for p in waiting if p.rank == place.rank), "first come"
            waiting.append(place)
        elif waiting:
            first = min(waiting)
            waiting.remove(first)
            line.admit(first)
            for other in waiting:
                passed[other] += first.arrival > other.arrival
                assert passed[other] <= EVERY * (ahead[other] + 1)
                if SERVICES[other.rank] == INTERACTIVE:
                    assert passed[other] <= ahead[other] // EVERY + 1


def test_places_do_not_move_away_while_only_background_requests_are_served() -> None:
    line = Line()
    for arrival in range(100):
        line.admit(line.place(BACKGROUND, arrival))
    batch = [line.place(BACKGROUND, 100 + i) for i in range(50)]
    chat = line.place(INTERACTIVE, 200)
    assert chat < batch[0], "it goes before the whole batch"


# ---- rows and places in the batch ----------------------------------------------------------------


def test_a_chat_goes_before_a_batch_that_came_first() -> None:
    engine, _ = engine_of(hashed(250), max_running=1)
    batch = [serve(engine, [i], BACKGROUND, n=3) for i in range(5)]
    engine.step()
    chat = serve(engine, [9], INTERACTIVE, n=3)
    while not chat.end:
        engine.step()
    assert [bool(answer.end) for answer in batch] == [True, False, False, False, False]
    run_all(engine)


def test_a_batch_is_served_while_chats_never_cease() -> None:
    """One place to run in, and always two chats waiting for it."""
    engine, _ = engine_of(hashed(250), max_running=1)
    for i in range(3):
        serve(engine, [i], INTERACTIVE, n=2)
    batch = [serve(engine, [100 + i], BACKGROUND, n=2) for i in range(3)]
    ends: list[int] = []
    for n_chats in range(100):
        serve(engine, [n_chats], INTERACTIVE, n=2)
        engine.step()
        engine.step()
        done = sum(answer.end is not None for answer in batch)
        ends += [n_chats] * (done - len(ends))
    assert len(ends) == 3
    assert all(end <= (EVERY + 1) * (nth + 1) + 3 for nth, end in enumerate(ends))
    assert all(answer.finish.reason == "length" for answer in batch)


def test_prompts_of_chats_get_rows_first_but_in_one_step_of_eight() -> None:
    scheduler = scheduler_of(600, step_rows=4, max_running=4)
    batch = request_of(0, 1000, 1001)
    batch.service = BACKGROUND
    scheduler.add(batch)
    run(scheduler)
    for arrival in (1, 2):
        scheduler.add(request_of(arrival, 500, 501))
    rows = [run(scheduler) for _ in range(4 * EVERY)]
    assert sum("r0" in step for step in rows) == 4
    assert [i for i, step in enumerate(rows) if step == {"r0": 4}] == [6, 14, 22, 30]
    assert all(step in ({"r0": 4}, {"r1": 4}) for step in rows), "first come inside a class"


def test_a_batch_leaves_places_to_chats() -> None:
    scheduler = scheduler_of(64, max_running=8)
    for arrival in range(12):
        request = request_of(arrival, 1)
        request.service = BACKGROUND
        scheduler.add(request)
    assert len(run(scheduler)) == 6
    scheduler.add(request_of(12, 1))
    assert "r12" in run(scheduler)


def test_a_chat_does_not_wait_for_a_prefix_a_batch_computes_and_the_batch_takes_it_over() -> None:
    engine, executor = engine_of(hashed(250), context=256, step_rows=20)
    batch = serve(engine, [1] * 200 + [2], BACKGROUND)
    engine.step()
    chat = serve(engine, [1] * 200 + [3], INTERACTIVE)
    run_all(engine)
    assert chat.finish.trace.miss == ("new", 20), "what the batch had done before, to the token"
    assert batch.finish.n_cached > 100, "what the chat did while it had the rows"
    assert sum(step.n_rows for step in executor.steps) < 201 + 60
    assert batch.finish.timings.ttft_ms > chat.finish.timings.ttft_ms  # type: ignore[operator]


def test_a_preempted_batch_keeps_its_place() -> None:
    scheduler = scheduler_of(6)
    batch, chat = request_of(0, 8, 20), request_of(1, 8, 20)
    batch.service = BACKGROUND
    scheduler.add(batch)
    scheduler.add(chat)
    while batch.state is not State.WAITING or not batch.n_preempted:
        assert run(scheduler)
    place = batch.place
    run(scheduler)
    assert batch.place == place
    assert chat.state is State.RUNNING


# ---- deadlines -----------------------------------------------------------------------------------

SLOW = {"executor": {"seconds_per_step": 0.02}}


@pytest.mark.parametrize(
    ("options", "n_before", "said"),
    [
        ({"max_running": 1}, 0, r"deadline of 50 ms .* 0 of 6 prompt tokens"),
        ({"step_rows": 1}, 0, r"deadline of 50 ms .* [1-4] of 6 prompt tokens"),
        ({}, 1, r"deadline of 50 ms .* [1-9] output tokens"),
    ],
    ids=["queued", "prefill", "decode"],
)
def test_a_late_request_ends_in_every_state(
    options: dict[str, Any], n_before: int, said: str
) -> None:
    engine, _ = engine_of(hashed(250), **SLOW, **options)
    if "max_running" in options:
        serve(engine, [1], INTERACTIVE, n=10)
    late = serve(engine, [2] * 6, INTERACTIVE, n=50, deadline_ms=50)
    run_all(engine)
    assert late.finish.reason == "deadline"
    assert (late.finish.n_output > 0) == bool(n_before)
    assert re.search(said, late.finish.error or "")
    assert late.finish.timings.end_to_end_ms >= 50
    assert engine.stats().finished["deadline"] == 1


def test_a_request_in_time_does_not_notice_its_deadline() -> None:
    engine, _ = engine_of(hashed(250))
    answer = serve(engine, [1], INTERACTIVE, n=5, deadline_ms=60_000)
    run_all(engine)
    assert (answer.finish.reason, answer.finish.error) == ("length", None)


@pytest.mark.parametrize("deadline_ms", [0, -1, float("nan")])
def test_deadlines_in_the_past_are_refused(deadline_ms: float) -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestError) as caught:
        serve(engine, [1], INTERACTIVE, deadline_ms=deadline_ms)
    assert caught.value.field == "deadline_ms"


def test_unknown_services_are_refused() -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestError, match="interactive, background") as caught:
        serve(engine, [1], "best")  # type: ignore[arg-type]
    assert caught.value.field == "service"
