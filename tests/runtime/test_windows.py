"""Layers with a window give back what it has left, and no answer changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.runtime.block_table import BlockTable
from martlet.runtime.errors import MartletError, ModelError
from martlet.runtime.kv_blocks import BlockPool
from martlet.runtime.prefix_store import PrefixStore
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.window_parts import WindowParts, window_blocks

from .harness import Answer, ask, engine_of, run_all
from .scripted import hashed
from .tiny import Chunk, make_step, run_tokens, tiny_model

BLOCK, WINDOW = 4, 10
SMALL: dict[str, Any] = {"block_tokens": BLOCK, "window": WINDOW, "n_blocks": 60}


def engine_with(n_parts: int, **options: Any) -> Any:
    executor = {**SMALL, "n_window_blocks": n_parts}
    engine, _ = engine_of(hashed(250), context=120, step_rows=8, executor=executor, **options)
    return engine


def prompt_of(n_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 250 for i in range(n_tokens)]


def test_a_long_request_needs_its_window_alone() -> None:
    engine = engine_with(window_blocks(WINDOW, BLOCK) + 2)
    answer = ask(engine, prompt_of(80), max_tokens=30)
    most = 0
    while engine.step():
        engine.scheduler.check()
        most = max(most, engine.stats().window_blocks_used)
    assert answer.finish.n_output == 30
    assert most <= 7 < 110 // BLOCK
    stats = engine.stats()
    assert (stats.window_blocks_total, stats.window_blocks_used) == (7, 0)


def test_a_repeated_prompt_is_found_by_its_last_window() -> None:
    engine = engine_with(12)
    for expected in (0, 79):
        answer = ask(engine, prompt_of(80), max_tokens=1)
        run_all(engine)
        assert answer.finish.n_cached == expected, "all but the last token"


def test_a_hit_moves_back_to_where_the_window_is_still_there() -> None:
    """The full layers know all of it; the parts of the middle have given way."""
    engine = engine_with(12)
    ask(engine, prompt_of(80), max_tokens=1)
    run_all(engine)
    request = engine.submit(
        [*prompt_of(40), 251, *prompt_of(9)], SamplingParams(max_tokens=1), Answer()
    )
    run_all(engine)
    assert (request.n_cached, request.miss) == (0, ("evicted", 0))


def test_a_branch_near_the_end_uses_what_is_left() -> None:
    engine = engine_with(20)
    ask(engine, prompt_of(80), max_tokens=1)
    run_all(engine)
    branch = ask(engine, [*prompt_of(61), 251, 252, 253], max_tokens=1)
    run_all(engine)
    assert branch.finish.n_cached == 61


def test_a_block_computed_again_brings_its_part_back() -> None:
    """Other requests take the parts; the prompt is computed again over blocks that are known, and
    found whole after that."""
    engine = engine_with(12)
    found = []
    for prompt in (prompt_of(40), prompt_of(60, 3), prompt_of(40), prompt_of(40)):
        answer = ask(engine, prompt, max_tokens=1)
        run_all(engine)
        found.append(answer.finish.n_cached)
    assert found == [0, 0, 0, 39]


def test_no_more_run_than_windows_fit_and_all_finish() -> None:
    engine = engine_with(2 * window_blocks(WINDOW, BLOCK) + 2)
    answers = [ask(engine, prompt_of(30, i), max_tokens=20) for i in range(6)]
    most = 0
    while engine.step():
        engine.scheduler.check()
        most = max(most, engine.stats().running)
    assert most == 2
    assert all(answer.finish.n_output == 20 for answer in answers)


def test_too_few_window_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"5 window blocks .* 8 rows"):
        engine_with(window_blocks(WINDOW, BLOCK))
    with pytest.raises(ModelError, match="window 0"):
        WindowParts(4, 2, window=0, block_tokens=4)


def test_one_part_per_block_is_the_old_pool() -> None:
    assert BlockPool(8, 4, window=9, n_window_blocks=8).parts is None
    assert BlockPool(8, 4, window=9).parts is None
    assert BlockPool(8, 4).parts is None


def test_parts_behind_the_window_are_dropped_where_nobody_can_find_them() -> None:
    pool = BlockPool(16, 4, window=6, n_window_blocks=6, prefix_reuse=False)
    assert pool.parts
    table = BlockTable()
    pool.grow(table, 40)
    for at in range(0, 40, 4):
        pool.open_window(table, at, 4)
        pool.slide_window(table, at + 4)
        pool.check([table])
        pool.check_window(table, at + 4)
        assert sum(pool.parts.has(b) for b in range(16)) <= 3
    pool.release(table)
    pool.check([])
    assert not any(pool.parts.has(b) for b in range(16))


# ---- on disk -------------------------------------------------------------------------------------


def test_a_restarted_engine_finds_a_prompt_by_its_last_window(tmp_path: Path) -> None:
    cached = []
    for _ in range(2):
        engine = engine_with(12, prefix_store=PrefixStore(tmp_path, b"same"))
        answer = ask(engine, prompt_of(80), max_tokens=4)
        run_all(engine)
        engine.scheduler.check()
        engine.close()
        assert answer.finish.reason != "error"
        cached.append((answer.finish.n_cached, tuple(answer.ids)))
    assert cached[1] == (76, cached[0][1])
    assert cached[0][0] == 0


def test_what_the_window_has_lost_comes_back_from_disk(tmp_path: Path) -> None:
    """The full layers still know the prompt; the windowed ones gave their part to another."""
    engine = engine_with(12, prefix_store=PrefixStore(tmp_path, b"same"))
    found = []
    for prompt in (prompt_of(40), prompt_of(60, 3), prompt_of(40)):
        answer = ask(engine, prompt, max_tokens=3)
        run_all(engine)
        engine.scheduler.check()
        found.append((answer.finish.n_cached, answer.ids))
    assert [n for n, _ in found] == [0, 0, 36]
    assert found[2][1] == found[0][1]
    engine.close()


# ---- what executors make of it -------------------------------------------------------------------


def executors() -> list[Any]:
    from martlet.runtime.executors.numba_executor import NumbaExecutor
    from martlet.runtime.executors.reference import ReferenceExecutor

    try:
        from martlet.runtime.executors.native import NativeExecutor
        from martlet.runtime.executors.native_library import Library

        Library()
    except MartletError:
        return [ReferenceExecutor, NumbaExecutor]
    return [ReferenceExecutor, NumbaExecutor, NativeExecutor]


@pytest.mark.parametrize("kind", executors(), ids=lambda kind: str(kind.name))
def test_three_window_blocks_are_enough_for_a_long_sequence(kind: Any) -> None:
    """Blocks of 16 in turn, those behind the window named by nothing; and the bits are the same."""
    model = tiny_model("gemma3", formats=("Q8_0",))
    plan, tokens = model.plan(16), [(11 * i) % 300 for i in range(100)]
    whole = kind(plan, model.weights, block_tokens=16, n_blocks=7)
    expected = run_tokens(whole, tokens, chunk=5)
    few = kind(plan, model.weights, block_tokens=16, n_blocks=7, n_window_blocks=3)
    assert (few.window, few.n_window_blocks) == (20, 3)
    got = []
    for at in range(0, 100, 5):
        step = make_step([Chunk(tokens[at : at + 5], at, range(7))])
        table = np.full((1, 7), -1, np.int32)
        for place in range(max(0, at - 19) // 16, (at + 4) // 16 + 1):
            table[0, place] = place % 3
        got.append(few.run(replace(step, window_table=table)))
    assert np.array_equal(np.concatenate(got), expected)


def test_a_step_without_its_window_is_refused() -> None:
    native = pytest.importorskip("martlet.runtime.executors.native")
    model = tiny_model("gemma3", formats=("Q8_0",))
    executor = native.NativeExecutor(
        model.plan(16), model.weights, block_tokens=16, n_blocks=7, n_window_blocks=3
    )
    step = make_step([Chunk([1], 40, range(7))])
    for table in ([[0, 1, -1, 0, 0, 0, 0]], [[0, 3, 0, 0, 0, 0, 0]], [[0, -1, 0, 0, 0, 0, 0]]):
        with pytest.raises(ModelError, match=r"window block . of sequence 0 is .*has 3"):
            executor.run(replace(step, window_table=np.array(table, np.int32)))
    executor.run(replace(step, window_table=np.array([[-1, 1, 2, -1, -1, -1, -1]], np.int32)))
    with pytest.raises(ModelError, match="window table has shape"):
        executor.run(replace(step, window_table=np.zeros((1, 3), np.int32)))
    for call in (
        lambda: executor.copy_block(0, 1, (0, 3)),
        lambda: executor.read_block(0, 3),
        lambda: executor.write_block(5, executor.read_block(0, 0), -1),
    ):
        with pytest.raises(ModelError, match=r"pool has 7 \(3\)"):
            call()
