"""Who gets rows: order, chunks, admission, preemption. No engine, no weights, no threads."""

from __future__ import annotations

import numpy as np
import pytest
from martlet.runtime.block_table import BlockTable
from martlet.runtime.kv_blocks import BlockPool
from martlet.runtime.request import Request, Scheduled, State
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.scheduler import Scheduler
from martlet.runtime.step import build_step
from martlet.runtime.textstream import TextStream

from .scripted import ScriptedTokenizer

BLOCK = 4


def scheduler_of(n_blocks: int, *, step_rows: int = 16, max_running: int = 8) -> Scheduler:
    pool = BlockPool(n_blocks, BLOCK)
    return Scheduler(pool, step_rows=step_rows, max_running=max_running)


def request_of(arrival: int, n_prompt: int, n_total: int = 64) -> Request:
    """A prompt no other shares: its first token is the arrival number."""
    buffer = np.full(n_total, 1, np.int32)
    buffer[0] = 100 + arrival
    return Request(
        id=f"r{arrival}",
        arrival=arrival,
        buffer=buffer,
        n_prompt=n_prompt,
        params=SamplingParams(),
        seed=0,
        on_event=lambda event: None,
        text=TextStream(ScriptedTokenizer()),
        table=BlockTable(),
        arrived_ns=0,
    )


def run(scheduler: Scheduler) -> dict[str, int]:
    """One step: rows per request. Requests that reach their last token get another one."""
    granted = scheduler.schedule()
    drawing = [item.request for item in granted if item.wants_logits]
    scheduler.check()
    scheduler.commit(granted)
    for request in drawing:
        request.append(1)
        if request.is_full:
            scheduler.remove(request)
    scheduler.check()
    return {item.request.id: item.n_rows for item in granted}


def run_all(scheduler: Scheduler, most_steps: int = 500) -> None:
    for _ in range(most_steps):
        if not run(scheduler):
            assert not scheduler.waiting
            return
    raise AssertionError(f"not finished after {most_steps} steps")


def test_a_long_prompt_is_cut_into_chunks_of_the_row_budget() -> None:
    scheduler = scheduler_of(32, step_rows=16)
    scheduler.add(request_of(0, 40))
    assert [run(scheduler) for _ in range(4)] == [{"r0": 16}, {"r0": 16}, {"r0": 8}, {"r0": 1}]


def test_decodes_go_first_and_prompts_share_the_rest_in_order_of_arrival() -> None:
    scheduler = scheduler_of(64, step_rows=16)
    scheduler.add(request_of(0, 20))
    run(scheduler)
    for request in (request_of(1, 5), request_of(2, 30), request_of(3, 2)):
        scheduler.add(request)
    assert run(scheduler) == {"r0": 4, "r1": 5, "r2": 7}, "a prompt that arrived first goes first"
    granted = scheduler.schedule()
    assert [(s.request.id, s.n_rows) for s in granted] == [("r0", 1), ("r1", 1), ("r2", 14)]


def test_decodes_never_miss_a_step_while_a_prompt_comes_in() -> None:
    scheduler = scheduler_of(64, step_rows=4)
    for arrival in range(3):
        scheduler.add(request_of(arrival, 1))
    run(scheduler)
    scheduler.add(request_of(3, 20))
    for _ in range(20):
        assert run(scheduler) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}


def test_a_decode_goes_before_an_older_request_that_has_much_to_compute() -> None:
    scheduler = scheduler_of(64, step_rows=16)
    older, younger = request_of(0, 1), request_of(1, 1)
    scheduler.add(older)
    scheduler.add(younger)
    run(scheduler)
    older.n_tokens += 30
    granted = scheduler.schedule()
    assert [(s.request.id, s.n_rows) for s in granted] == [("r1", 1), ("r0", 15)]


def test_no_more_requests_run_than_rows_or_max_running() -> None:
    for step_rows, max_running, expected in ((2, 8, 2), (16, 3, 3)):
        scheduler = scheduler_of(64, step_rows=step_rows, max_running=max_running)
        for arrival in range(5):
            scheduler.add(request_of(arrival, 1))
        assert len(run(scheduler)) == expected


def test_the_youngest_is_preempted_and_comes_back_at_its_old_place() -> None:
    scheduler = scheduler_of(6, step_rows=16)
    old, young, late = request_of(0, 8, 24), request_of(1, 8, 16), request_of(2, 4, 8)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler)
    scheduler.add(late)
    while scheduler.n_preemptions == 0:
        run(scheduler)
    assert young.state is State.WAITING
    assert (young.n_computed, young.table.blocks) == (0, [])
    assert young.n_tokens > young.n_prompt, "it keeps the tokens it owns"
    assert scheduler.waiting == [young, late]
    assert old.state is State.RUNNING
    run_all(scheduler)


def test_a_preempted_request_is_recomputed_up_to_its_newest_token() -> None:
    scheduler = scheduler_of(16, step_rows=8)
    request = request_of(0, 3)
    scheduler.add(request)
    for _ in range(9):
        run(scheduler)
    assert (request.n_tokens, request.n_computed) == (12, 11)
    scheduler.pool.prefix_reuse = False
    scheduler._preempt(request)
    assert [run(scheduler) for _ in range(3)] == [{"r0": 8}, {"r0": 4}, {"r0": 1}]


@pytest.mark.parametrize("reuse", [False, True])
def test_two_requests_too_large_together_both_finish(reuse: bool) -> None:
    """B94 (b): ten blocks, two requests of six each."""
    scheduler = scheduler_of(10)
    scheduler.pool.prefix_reuse = reuse
    requests = [request_of(arrival, 8, 24) for arrival in range(2)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler)
    assert all(r.n_tokens == 24 for r in requests)
    assert 1 <= scheduler.n_preemptions <= 2
    assert scheduler.pool.n_held == 0


def test_many_growing_requests_in_a_small_pool_preempt_a_bounded_number_of_times() -> None:
    scheduler = scheduler_of(12, step_rows=16, max_running=8)
    requests = [request_of(arrival, 3, 40) for arrival in range(8)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, most_steps=2000)
    assert all(r.is_full for r in requests)
    # Each preemption needs the growth of an older request by at least one of its ten blocks.
    assert scheduler.n_preemptions <= 8 * 10


def test_a_request_without_room_waits_and_nobody_overtakes_it() -> None:
    scheduler = scheduler_of(6)
    scheduler.add(request_of(0, 12, 20))
    run(scheduler)
    scheduler.add(request_of(1, 20, 21))
    scheduler.add(request_of(2, 2, 4))
    assert set(run(scheduler)) == {"r0"}
    run_all(scheduler)


def test_a_spare_block_is_left_to_each_running_request() -> None:
    """Or the new one would be preempted as soon as an older one grows."""
    scheduler = scheduler_of(6)
    scheduler.add(request_of(0, 8, 17))
    run(scheduler)
    scheduler.add(request_of(1, 12, 16))  # three blocks: as many as are free, and none to spare
    assert run(scheduler) == {"r0": 1}
    run_all(scheduler)
    assert scheduler.n_preemptions == 0


def test_removing_the_blocked_head_lets_the_next_one_in() -> None:
    scheduler = scheduler_of(6)
    head = request_of(1, 20, 21)
    scheduler.add(request_of(0, 12, 20))
    scheduler.add(head)
    scheduler.add(request_of(2, 2, 4))
    assert set(run(scheduler)) == {"r0"}
    scheduler.remove(head)
    assert set(run(scheduler)) == {"r0", "r2"}


def test_removed_requests_leave_nothing_behind() -> None:
    scheduler = scheduler_of(16, step_rows=4)
    running, waiting = request_of(0, 20), request_of(1, 60, 64)
    scheduler.add(running)
    scheduler.add(waiting)
    run(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert run(scheduler) == {}
    assert scheduler.pool.n_free == 16


def test_step_arrays_of_a_mixed_step() -> None:
    first, second = request_of(0, 6), request_of(1, 3)
    first.table.blocks[:], second.table.blocks[:] = [5, 2], [7]
    first.n_computed = 4
    step = build_step([Scheduled(second, 2), Scheduled(first, 2)])
    assert step.tokens.tolist() == [101, 1, 1, 1]
    assert step.positions.tolist() == [0, 1, 4, 5]
    assert step.seq_start.tolist() == [0, 2, 4]
    assert step.block_table.tolist() == [[7, 0], [5, 2]]
    assert step.out_rows.tolist() == [3], "the second has one more prompt token to compute"
    assert (step.n_rows, step.n_seqs, step.n_out) == (4, 2, 1)
    floats = (step.adapters, step.given)
    for array in vars(step).values():
        assert array.dtype == (np.float32 if any(array is f for f in floats) else np.int32)
        assert array.flags.c_contiguous
