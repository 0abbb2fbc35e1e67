"""Layers with a window give back what it has left, and no answer changes."""

from __future__ import annotations

from typing import Any

import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.kv_blocks import BlockPool, BlockTable
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.window_parts import WindowParts, window_blocks

from .harness import Answer, ask, engine_of, run_all
from .scripted import hashed

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
    for expected in (0, 76):
        answer = ask(engine, prompt_of(80), max_tokens=1)
        run_all(engine)
        assert answer.finish.n_cached == expected, "19 blocks before the one with the last token"


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
    assert branch.finish.n_cached == 60


def test_a_block_computed_again_brings_its_part_back() -> None:
    """Other requests take the parts; the prompt is computed again over blocks that are known, and
    found whole after that."""
    engine = engine_with(12)
    found = []
    for prompt in (prompt_of(40), prompt_of(60, 3), prompt_of(40), prompt_of(40)):
        answer = ask(engine, prompt, max_tokens=1)
        run_all(engine)
        found.append(answer.finish.n_cached)
    assert found == [0, 0, 0, 36]


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
