"""A common prefix is computed once, also by requests that arrive together; and why one was not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime.block_table import BlockTable
from martlet.runtime.kv_blocks import BlockPool
from martlet.runtime.prefix_index import MISS_REASONS
from martlet.runtime.sampling import SamplingParams

from .harness import Answer, ask, engine_of, run_all
from .scripted import ScriptedExecutor, hashed

BLOCK = 16
SYSTEM = [i % 250 for i in range(100)]  # six full blocks and four tokens
LARGE: dict[str, Any] = {"context": 256, "executor": {"n_blocks": 400}, "max_running": 16}


def rows_of(executor: ScriptedExecutor) -> int:
    return sum(step.n_rows for step in executor.steps)


def answers_alone(prompts: list[list[int]], **params: Any) -> list[list[int]]:
    ids = []
    for prompt in prompts:
        engine, _ = engine_of(hashed(250), context=256)
        answer = ask(engine, prompt, **params)
        run_all(engine)
        ids.append(answer.ids)
    return ids


def test_sixteen_chats_that_arrive_together_compute_the_system_prompt_once() -> None:
    prompts = [[*SYSTEM, 250, 100 + i, 3] for i in range(16)]
    engine, executor = engine_of(hashed(250), step_rows=64, **LARGE)
    answers = [ask(engine, prompt, max_tokens=4) for prompt in prompts]
    most_held = 0
    while engine.step():
        engine.scheduler.check()
        most_held = max(most_held, engine.stats().blocks_used)
    assert most_held <= 6 + 16, "one copy, and a block for each tail"
    assert rows_of(executor) == 103 + 15 * 2 + 16 * 3
    assert [a.finish.n_cached for a in answers] == [0] + [101] * 15
    assert [a.ids for a in answers] == answers_alone(prompts, max_tokens=4)


def test_equal_prompts_compute_all_but_the_block_with_the_last_token_once() -> None:
    """n > 1 and best_of: the same prompt with other seeds."""
    engine, executor = engine_of(hashed(250), **LARGE)
    answers = [ask(engine, SYSTEM, max_tokens=1, seed=i) for i in range(8)]
    run_all(engine)
    assert rows_of(executor) == 100 + 7 * 4
    assert len({tuple(a.ids) for a in answers}) == 1


def test_a_tree_of_prefixes_computes_every_edge_once() -> None:
    trunk, left, right = [1] * 32, [2] * 32, [3] * 32
    prompts = [trunk + branch + [9, i] for branch in (left, right) for i in range(3)]
    engine, executor = engine_of(hashed(250), step_rows=20, **LARGE)
    answers = [ask(engine, prompt, max_tokens=1) for prompt in prompts]
    run_all(engine)
    assert rows_of(executor) == 32 * 3 + 6 * 2
    assert [a.ids for a in answers] == answers_alone(prompts, max_tokens=1)


def test_a_follower_takes_over_where_a_cancelled_leader_stopped() -> None:
    engine, executor = engine_of(hashed(250), step_rows=40, **LARGE)
    leader = ask(engine, [*SYSTEM, 7], request_id="leader")
    followers = [ask(engine, [*SYSTEM, 8 + i], max_tokens=2) for i in range(2)]
    engine.step()
    assert engine.stats().running == 1, "the others wait for what it computes"
    engine.cancel("leader")
    run_all(engine)
    assert leader.finish.reason == "cancelled"
    assert [f.finish.n_cached for f in followers] == [32, 100], "two of its blocks were whole"
    assert rows_of(executor) == 40 + (101 - 32) + (101 - 100) + 2
    assert [f.ids for f in followers] == answers_alone([[*SYSTEM, 8], [*SYSTEM, 9]], max_tokens=2)


def test_a_leader_that_fails_is_followed_by_the_next() -> None:
    engine, executor = engine_of(hashed(250), step_rows=40, **LARGE)
    leader, follower = ask(engine, [*SYSTEM, 7]), ask(engine, [*SYSTEM, 8], max_tokens=2)
    executor.fail_next = RuntimeError("no")
    run_all(engine)
    assert (leader.finish.reason, follower.finish.reason) == ("error", "length")
    assert follower.finish.n_cached == 0


def test_others_pass_a_request_that_waits_for_a_prefix() -> None:
    engine, _ = engine_of(hashed(250), step_rows=40, **LARGE)
    ask(engine, [*SYSTEM, 7], max_tokens=1)
    follower = ask(engine, [*SYSTEM, 8], max_tokens=1)
    other = ask(engine, [200, 201], max_tokens=1)
    for _ in range(3):
        engine.step()
    assert follower.end is None
    assert other.finish.reason == "length", "in the step that ends the first one's prompt"
    run_all(engine)
    assert follower.finish.n_cached == 96


def test_without_reuse_and_across_salts_nobody_waits() -> None:
    for options, salts in (({"prefix_reuse": False}, (b"", b"")), ({}, (b"a", b"b"))):
        engine, _ = engine_of(hashed(250), step_rows=40, **LARGE, **options)
        for salt in salts:
            engine.submit(SYSTEM, SamplingParams(), Answer(), cache_salt=salt)
        engine.step()
        assert engine.stats().running == 2


@given(
    branches=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([5, 6]), st.integers(1, 9)),
        min_size=2,
        max_size=12,
    ),
    step_rows=st.integers(1, 40),
    cancelled_at=st.dictionaries(st.integers(0, 11), st.integers(0, 8), max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_requests_that_arrive_together_compute_no_block_twice(
    branches: list[tuple[int, int, int]], step_rows: int, cancelled_at: dict[int, int]
) -> None:
    """Any tree of prompts, leaders cancelled at any time: a token behind a prefix of full blocks
    has one slot and is computed once, but for blocks that a cancellation or an end left unfinished
    and those with a prompt's last token."""
    prompts = [[1] * common + [branch] * n for common, branch, n in branches]
    engine, executor = engine_of(
        hashed(250), context=64, step_rows=step_rows, max_running=12, executor={"block_tokens": 4}
    )
    answers = [ask(engine, p, max_tokens=1, request_id=str(i)) for i, p in enumerate(prompts)]
    now, is_busy = 0, True
    while is_busy:
        for index, at in cancelled_at.items():
            if at == now:
                engine.cancel(str(index))
        is_busy = engine.step()
        engine.scheduler.check()
        now += 1
    wholes = {tuple(p[:end]) for p in prompts for end in range(4, len(p), 4)}
    tails = sum((len(p) - 1) % 4 + 1 for p in prompts)
    assert rows_of(executor) <= 4 * len(wholes) + tails + 4 * len(cancelled_at)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = hashed(250)(np.array(prompt, np.int32))
        assert answer.ids in ([expected], []), "the answer it would have alone"
        assert answer.ids or answer.finish.reason == "cancelled"


# ---- why a hit ended -----------------------------------------------------------------------------


def miss_of(engine: Any, prompt: list[int], **options: Any) -> tuple[str, int] | None:
    request = engine.submit(prompt, SamplingParams(max_tokens=1), Answer(), **options)
    run_all(engine)
    return request.miss


def test_every_miss_has_a_reason_and_a_place() -> None:
    engine, _ = engine_of(hashed(250), context=256, executor={"n_blocks": 12})
    assert miss_of(engine, SYSTEM) == ("new", 0)
    assert miss_of(engine, SYSTEM) is None, "all it may take was there"
    assert miss_of(engine, [251, 2, 3]) == ("too_short", 0)
    assert miss_of(engine, SYSTEM[:40] + [251] * 20) == ("differs", 40)
    assert miss_of(engine, [251] * 17) == ("differs", 0)
    assert miss_of(engine, SYSTEM[:3] + [251] * 2) == ("differs", 3)
    assert miss_of(engine, SYSTEM[:4]) is None
    assert miss_of(engine, SYSTEM[:96] + [251] * 20) == ("new", 96)
    assert miss_of(engine, SYSTEM, cache_salt=b"other") == ("salt", 0)
    assert miss_of(engine, [252] * 40) == ("differs", 0)
    assert miss_of(engine, SYSTEM, reads_cache=False) == ("bypassed", 0)
    miss_of(engine, [7] * 190)
    reason, at_token = miss_of(engine, SYSTEM) or ("", 0)
    assert reason == "evicted"
    assert at_token < 96
    engine, _ = engine_of(prefix_reuse=False)
    assert miss_of(engine, [1] * 40) == ("off", 0)


def test_a_collision_is_told_from_other_misses() -> None:
    pool = BlockPool(8, 4, hash_block=lambda parent, content: b"same")
    for tokens in (np.arange(9, dtype=np.int32), np.arange(10, 19, dtype=np.int32)):
        table = BlockTable()
        pool.attach_prefix(table, tokens)
        miss = pool.why_missing(table, tokens)
        pool.grow(table, 9)
        pool.register(table, tokens, 9)
    assert miss == ("collision", 0)


@pytest.mark.parametrize("reason", MISS_REASONS)
def test_every_reason_is_explained(reason: str) -> None:
    assert MISS_REASONS[reason]  # type: ignore[index]


def test_a_request_that_bypasses_the_cache_computes_every_row_and_others_may_use_them() -> None:
    engine, executor = engine_of(hashed(250), context=256)
    engine.submit(SYSTEM, SamplingParams(max_tokens=1), Answer())
    run_all(engine)
    again = Answer()
    engine.submit(SYSTEM, SamplingParams(max_tokens=1, temperature=0.0), again, reads_cache=False)
    run_all(engine)
    assert rows_of(executor) == 200
    assert again.finish.n_cached == 0


# ---- what the counts say -------------------------------------------------------------------------


def test_stats_tell_shared_blocks_waste_and_misses() -> None:
    engine, _ = engine_of(hashed(250), **LARGE)
    assert engine.stats().fragmentation == 1.0
    for i in range(3):
        ask(engine, [*SYSTEM, 200 + i], max_tokens=8)
    while engine.stats().running < 3:
        assert engine.step()
    stats = engine.stats()
    assert (stats.blocks_used, stats.blocks_shared) == (6 + 3, 6)
    n_tokens = 96 + sum(r.n_tokens - 96 for r in engine.scheduler.running)
    assert stats.fragmentation == 9 * BLOCK / n_tokens
    run_all(engine)
    assert engine.stats().prefix_misses == {"new": 1}, "the others hit all they may"
    miss_of(engine, SYSTEM, cache_salt=b"x")
    assert engine.stats().prefix_misses == {"new": 2}, "what is under other salts is not told"
