"""The start that a block has in common with a known one is copied, and no answer changes."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from martlet.runtime.engine import Engine
from martlet.runtime.events import Event
from martlet.runtime.prefix_index import MOST_SIBLINGS, Key, Prefix, PrefixIndex, blake2b_chain
from martlet.runtime.prefix_store import PrefixStore
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.window_parts import window_blocks

from .harness import Answer, ask, engine_of, run_all
from .scripted import ScriptedExecutor, ScriptedTokenizer, hashed

BLOCK = 4
EXECUTOR: dict[str, Any] = {"block_tokens": BLOCK, "n_blocks": 200}
SHORT: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}


def engine_with(**options: Any) -> tuple[Engine, ScriptedExecutor]:
    return engine_of(hashed(250), context=80, **{"executor": EXECUTOR, **options})


def n_cached_of(engine: Engine, prompt: list[int], **options: Any) -> int:
    answer = Answer()
    engine.submit(prompt, SamplingParams(temperature=0.0, **SHORT), answer, **options)
    run_all(engine)
    assert answer.ids == [hashed(250)(np.array(prompt, np.int32))]
    return answer.finish.n_cached


# ---- which block, and how much of it -------------------------------------------------------------


def test_the_known_block_with_the_longest_common_start_is_copied() -> None:
    engine, executor = engine_with()
    trunk = [1, 2, 3, 4]
    for branch in ([5, 6, 9, 9], [5, 6, 7, 9], [5, 9, 9, 9]):
        n_cached_of(engine, [*trunk, *branch, 0])
    n_before = sum(step.n_rows for step in executor.steps)
    assert n_cached_of(engine, [*trunk, 5, 6, 7, 8, 0]) == 7
    assert sum(step.n_rows for step in executor.steps) == n_before + 2


@pytest.mark.parametrize("n_prompt", range(1, 10))
def test_the_last_token_is_computed_in_any_case(n_prompt: int) -> None:
    engine, _ = engine_with()
    n_cached_of(engine, list(range(12)))
    assert n_cached_of(engine, list(range(n_prompt))) == n_prompt - 1


def test_what_a_running_request_is_writing_is_copied() -> None:
    """Its block is not full, and known to nobody yet."""
    engine, _ = engine_with()
    ask(engine, [1, 2, 3, 4, 5, 6, 7], request_id="first", max_tokens=30, ignore_eos=True)
    engine.step()
    later = ask(engine, [1, 2, 3, 4, 5, 6, 9], **SHORT)
    while later.end is None:
        engine.step()
    assert engine.stats().running == 1, "the first one still writes"
    assert later.finish.n_cached == 6
    assert later.ids == [hashed(250)(np.array([1, 2, 3, 4, 5, 6, 9], np.int32))]


def test_only_what_is_computed_is_copied() -> None:
    engine, executor = engine_with(step_rows=6)
    executor.max_rows = 6
    leader = ask(engine, list(range(20)), **SHORT)
    engine.step()
    follower = ask(engine, [0, 1, 2, 3, 4, 5, 6, 9], **SHORT)
    run_all(engine)
    assert follower.finish.n_cached in (6, 7), "with the six rows of the first step, or later"
    assert leader.finish.n_cached == 0


def test_salts_keep_apart_and_who_bypasses_the_cache_copies_nothing() -> None:
    engine, _ = engine_with()
    prompt = list(range(9))
    assert n_cached_of(engine, prompt, cache_salt=b"a") == 0
    for begun in (prompt, prompt[:4], prompt[:2]):
        assert n_cached_of(engine, begun, cache_salt=b"b" * len(begun)) == 0
        assert n_cached_of(engine, begun, reads_cache=False) == 0
    assert n_cached_of(engine, [*prompt[:3], 99, 99], cache_salt=b"a") == 3
    engine, _ = engine_with(prefix_reuse=False)
    assert [n_cached_of(engine, prompt) for _ in range(2)] == [0, 0]


def test_running_requests_of_other_salts_are_no_source() -> None:
    engine, _ = engine_with()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.submit([1, 2, 3], params, Answer(), cache_salt=b"a")
    engine.step()
    assert n_cached_of(engine, [1, 2, 9]) == 0


def test_the_miss_is_told_where_the_copy_ended() -> None:
    engine, _ = engine_with()
    n_cached_of(engine, list(range(12)))

    def miss(prompt: list[int]) -> Any:
        request = engine.submit(prompt, SamplingParams(**SHORT), Answer())
        run_all(engine)
        return request.miss

    assert miss([0, 1, 2, 3, 4, 5, 99, 99, 99]) == ("differs", 6)
    assert miss([0, 1, 99, 99]) == ("differs", 2)
    assert miss([0, 1, 2]) is None, "all but its last token"
    assert engine.stats().prefix_misses["differs"] == 2


def test_a_source_is_given_up_after_what_was_of_no_use() -> None:
    engine, _ = engine_with(executor={"block_tokens": BLOCK, "n_blocks": 10})
    useful, useless = [1] * 8, [2] * 8
    n_cached_of(engine, useful)
    n_cached_of(engine, useless)
    assert n_cached_of(engine, [1, 1, 9]) == 2
    assert n_cached_of(engine, [3] * 33) == 0, "takes all but one block"
    assert n_cached_of(engine, [1, 1, 8]) == 2
    assert n_cached_of(engine, [2, 2, 8]) == 0


def test_a_failed_copy_ends_what_is_unfinished_and_the_engine_goes_on() -> None:
    engine, _ = engine_with()
    n_cached_of(engine, [1] * 9)
    copy_block = engine.scheduler._copy_block

    def broken(*_: Any) -> None:
        engine.scheduler._copy_block = copy_block
        raise OSError("no")

    engine.scheduler._copy_block = broken
    ended = threading.Semaphore(0)
    answers = [Answer() for _ in range(2)]
    engine.start()
    for answer in answers:

        def tell(what: Event, answer: Answer = answer) -> None:
            answer(what)
            if answer.end:
                ended.release()

        engine.submit([1] * 7, SamplingParams(temperature=0.0, **SHORT), tell)
        assert ended.acquire(timeout=60)
    engine.close()
    assert [answer.finish.reason for answer in answers] == ["error", "length"]
    assert answers[0].finish.error == "OSError: no"
    assert answers[1].finish.n_cached == 6
    engine.scheduler.pool.check([])


# ---- the index -----------------------------------------------------------------------------------


def test_of_many_blocks_only_the_newest_are_looked_at() -> None:
    index = PrefixIndex(BLOCK, b"", blake2b_chain, 10)
    keys: list[list[Key]] = [[] for _ in range(MOST_SIBLINGS + 1)]
    for i, own in enumerate(keys):
        key = index.key(own, b"", np.array([7, i, i, i], np.int32), 0)
        index.add(Prefix(key.digest, None, key.content, i))
    index.check()

    def run(*tokens: int, without: int = -1) -> tuple[int, int] | None:
        wanted = np.array(tokens, np.int32)
        found = index.longest_run(None, b"", wanted, lambda prefix: prefix.block != without)
        return found and (found[0].block, found[1])

    assert run(7, 64, 64, 64) == (64, 4)
    assert run(7, 64, 64) == (64, 3)
    assert run(7, 0, 0) == (64, 1), "that one is too old"
    assert run(7, 1, 1, without=1) == (64, 1)
    assert run(8, 1, 1) is None
    assert index.longest_run(None, b"salt", np.array([7], np.int32), lambda prefix: True) is None


# ---- windows, disk -------------------------------------------------------------------------------


def test_a_block_that_windowed_layers_have_lost_is_no_source() -> None:
    executor = {"block_tokens": BLOCK, "n_blocks": 60, "window": 6, "n_window_blocks": 8}
    engine, _ = engine_with(executor=executor, step_rows=4)
    n_cached_of(engine, list(range(40)))
    assert n_cached_of(engine, [*range(39), 99, 99]) == 39
    assert n_cached_of(engine, [0, 1, 99]) == 0, "the first block is behind the window"
    assert n_cached_of(engine, [0, 50, 51, 52, 53]) == 0
    assert n_cached_of(engine, [0, 1, 99]) == 1, "of the blocks that are there"


def test_blocks_on_disk_are_copied_once_they_are_back(tmp_path: Path) -> None:
    for life in range(2):
        engine, _ = engine_with(prefix_store=PrefixStore(tmp_path, b"same"))
        if life == 0:
            n_cached_of(engine, list(range(12)))
        else:
            assert n_cached_of(engine, [0, 1, 2, 3, 4, 5, 99]) == 4, "the second is on disk"
            assert n_cached_of(engine, list(range(10))) == 8
            assert n_cached_of(engine, [0, 1, 2, 3, 4, 5, 99]) == 6
        engine.close()


# ---- whatever happens ----------------------------------------------------------------------------

FEW = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=18)


@given(prompts=st.lists(FEW, min_size=1, max_size=12), block_tokens=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_one_after_the_other_each_computes_what_none_before_has(
    prompts: list[list[int]], block_tokens: int
) -> None:
    """Known are the full blocks of all earlier ones; of them the longest common start is taken."""
    engine, _ = engine_with(executor={"block_tokens": block_tokens, "n_blocks": 300})
    known: list[list[int]] = []
    for prompt in prompts:
        expected = max((common(prompt[:-1], other) for other in known), default=0)
        assert n_cached_of(engine, prompt) == expected
        known.append(prompt[: len(prompt) // block_tokens * block_tokens])
    assert engine.stats().tokens_cached + engine.stats().tokens_prefilled == sum(map(len, prompts))


def common(one: list[int], other: list[int]) -> int:
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)


@cache
def solo(prompt: tuple[int, ...]) -> list[int]:
    engine, _ = engine_with(prefix_reuse=False)
    answer = ask(engine, prompt, max_tokens=7, ignore_eos=True)
    run_all(engine)
    return answer.ids


VISITS = st.lists(
    st.tuples(
        st.one_of(FEW, st.integers(1, 18).map(lambda n: [1] * n)),
        st.integers(0, 9),
        st.sampled_from([None, None, 1, 3, 6]),
        st.sampled_from([b"", b"", b"salt"]),
    ),
    min_size=2,
    max_size=12,
)


@given(
    visits=VISITS,
    block_tokens=st.integers(2, 5),
    step_rows=st.integers(1, 12),
    n_spare_blocks=st.integers(0, 6),
    window=st.sampled_from([0, 1, 5, 9]),
    n_spare_parts=st.integers(0, 3),
    is_kept=st.booleans(),
    fails_at=st.sampled_from([None, None, 2, 5]),
)
@settings(max_examples=150, deadline=None)
def test_answers_are_those_of_a_solo_run(
    tmp_path_factory: pytest.TempPathFactory,
    visits: list[tuple[list[int], int, int | None, bytes]],
    block_tokens: int,
    step_rows: int,
    n_spare_blocks: int,
    window: int,
    n_spare_parts: int,
    is_kept: bool,
    fails_at: int | None,
) -> None:
    """Small pools, windows, salts, a disk that takes what is evicted, cancellations, a step that
    fails; and no block is written that anybody else could read."""
    n_blocks = -(-26 // block_tokens) + n_spare_blocks
    least_parts = window_blocks(window, block_tokens) + -(-step_rows // block_tokens)
    store = PrefixStore(tmp_path_factory.mktemp("kv"), b"", max_bytes=4000) if is_kept else None
    engine, executor = engine_with(
        executor={
            "block_tokens": block_tokens,
            "n_blocks": n_blocks,
            "window": window,
            "n_window_blocks": min(n_blocks, least_parts + n_spare_parts),
        },
        step_rows=step_rows,
        max_running=6,
        prefix_store=store,
    )
    n_copied = 0
    copy_block = engine.scheduler._copy_block

    def counting(src: int, dst: int, parts: tuple[int, int] | None) -> None:
        nonlocal n_copied
        n_copied += 1
        assert dst != src
        copy_block(src, dst, parts)

    engine.scheduler._copy_block = counting
    answers = [Answer() for _ in visits]
    for now in range(12):
        for i, (prompt, arrives_at, cancelled_at, salt) in enumerate(visits):
            if arrives_at == now:
                params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
                engine.submit(prompt, params, answers[i], request_id=str(i), cache_salt=salt)
            if cancelled_at == now:
                engine.cancel(str(i))
        if fails_at == now:
            executor.fail_next = RuntimeError("no")
        engine.step()
        engine.scheduler.check()
    run_all(engine)
    engine.close()
    event(f"copied {n_copied > 0}, preempted {engine.stats().preemptions > 0}, kept {is_kept}")
    for (prompt, _, _, _), answer in zip(visits, answers, strict=True):
        expected = solo(tuple(prompt))
        if answer.finish.reason in ("cancelled", "error"):
            assert answer.ids == expected[: len(answer.ids)]
        else:
            assert answer.ids == expected


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
def test_the_copy_has_the_same_bits(arch: str, kv_type: str) -> None:
    """Over the native executor, windows included; sources that run, and sources that ended."""
    native = pytest.importorskip("tests.runtime.test_engine_native")
    kind = native.KvType[kv_type]
    prompts = [tuple([*native.SYSTEM[:n], 250 + i, 3, 4]) for i, n in enumerate((29, 29, 31, 20))]
    for n_window_blocks in (None, 18):
        executor = native.executor_of(arch, kind, 24, 2, n_window_blocks)
        engine = Engine(executor, ScriptedTokenizer(eog_ids=()), context=native.CONTEXT)
        seen = native.recorded(engine)
        for first in (0, 2):
            for i in (first, first + 1):
                native.submit(engine, str(i), prompts[i])
            run_all(engine)
        assert engine.stats().tokens_cached == 29 + 29 + 20
        expected = [native.solo(arch, kind, prompt) for prompt in prompts]
        assert [seen[str(i)] for i in range(4)] == expected
        engine.close()
        executor.close()
