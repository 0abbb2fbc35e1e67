"""Recurrent layers: a known prefix is of use where their state behind it was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from martlet.runtime.block_table import NO_STATE, BlockTable
from martlet.runtime.errors import ModelError, UnsupportedError
from martlet.runtime.prefix_store import PrefixStore
from martlet.runtime.state_slots import StateSlots

from .harness import Answer, ask, engine_of, run_all
from .scripted import ScriptedExecutor, hashed

SYSTEM = [i % 250 for i in range(100)]  # six full blocks of 16 and four tokens


def recurrent(n_states: int = 20, **options: Any) -> dict[str, Any]:
    executor = {"n_blocks": 400, "n_states": n_states}
    return {"context": 256, "executor": executor, "max_running": 16, **options}


def rows_of(executor: ScriptedExecutor) -> int:
    return sum(step.n_rows for step in executor.steps)


def cached(answers: list[Answer]) -> list[int]:
    return [answer.finish.n_cached for answer in answers]


def test_the_next_turn_goes_on_from_the_end_of_the_last_prompt() -> None:
    engine, _ = engine_of(hashed(250), **recurrent())
    first = ask(engine, SYSTEM, max_tokens=20)
    run_all(engine)
    second = ask(engine, [*SYSTEM, *first.ids, 7, 8, 9], max_tokens=4)
    run_all(engine)
    assert second.finish.n_cached == 96  # blocks up to 112 are known, a state only there


def test_long_texts_keep_states_on_the_way() -> None:
    engine, executor = engine_of(hashed(250), state_every=32, **recurrent())
    ask(engine, SYSTEM, max_tokens=1)
    run_all(engine)
    again = ask(engine, [*SYSTEM[:80], 251, 252], max_tokens=1)
    run_all(engine)
    assert again.finish.n_cached == 64
    # 34 rows in the second run of the prompt, which it leaves at 80: a state is kept there
    third = ask(engine, [*SYSTEM[:85], 253], max_tokens=1)
    run_all(engine)
    assert third.finish.n_cached == 80
    assert rows_of(executor) == 100 + 18 + 6


def test_sixteen_chats_that_arrive_together_compute_the_system_prompt_once() -> None:
    engine, executor = engine_of(hashed(250), step_rows=64, **recurrent(n_states=32))
    answers = [ask(engine, [*SYSTEM, 250, 100 + i, 3], max_tokens=4) for i in range(16)]
    run_all(engine)
    assert cached(answers) == [0] + [96] * 15
    assert rows_of(executor) == 103 + 15 * 7 + 16 * 3


def test_why_a_known_block_was_not_used_can_be_asked_for() -> None:
    engine, _ = engine_of(hashed(250), **recurrent())
    ask(engine, SYSTEM, max_tokens=1)
    run_all(engine)
    answer = ask(engine, SYSTEM[:50], max_tokens=1)
    run_all(engine)
    assert answer.finish.trace is not None
    assert answer.finish.trace.miss == ("no_state", 0)


def test_a_request_takes_the_slot_of_the_snapshot_of_no_use_for_longest() -> None:
    engine, _ = engine_of(hashed(250), **recurrent(n_states=3))
    states = engine.scheduler.pool.states
    assert states is not None
    for start in (1, 2, 3, 1):  # two snapshots fit beside one that runs
        ask(engine, [start, *SYSTEM], max_tokens=1)
        run_all(engine)
    assert states.n_snapshots == 2
    answers = [ask(engine, [start, *SYSTEM], max_tokens=1) for start in (3, 1)]
    run_all(engine)
    assert cached(answers) == [96, 0]  # the second took the slot of its own one


def test_no_more_requests_run_than_there_are_slots() -> None:
    engine, _ = engine_of(hashed(250), **recurrent(n_states=2))
    answers = [ask(engine, [i, *SYSTEM], max_tokens=3) for i in range(5)]
    most = 0
    while engine.step():
        engine.scheduler.check()
        most = max(most, engine.stats().running)
    assert most == 2
    assert [len(answer.ids) for answer in answers] == [3] * 5


def test_prefixes_on_disk_are_refused(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, b"")
    with pytest.raises(UnsupportedError, match="recurrent layers cannot keep prefixes on disk"):
        engine_of(hashed(250), prefix_store=store, **recurrent())
    store.close()


def test_slots() -> None:
    moved: list[tuple[int, int]] = []
    slots = StateSlots(2, lambda src, dst: moved.append((src, dst)))
    a, b = BlockTable(), BlockTable()
    assert slots.own(a)
    slots.keep(7, a)
    assert moved == [(a.state, 1 - a.state)]
    assert slots.has(7)
    assert slots.own(b), "a snapshot gives way"
    assert not slots.has(7)
    slots.keep(8, a)
    assert not slots.has(8), "sequences own all slots"
    assert not slots.own(BlockTable())
    slots.disown(b)
    assert b.state == NO_STATE
    slots.keep(8, a)
    slots.go_on_from(8, a)
    assert moved[1:] == [(a.state, 1 - a.state), (1 - a.state, a.state)]
    slots.check([a, b])
    with pytest.raises(ModelError, match="0 slots"):
        StateSlots(0, lambda src, dst: None)
