"""Prefixes on disk: a restarted engine knows them, and nothing but an exact block is ever taken."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from martlet.runtime.engine import Engine
from martlet.runtime.errors import MartletError, UnsupportedError
from martlet.runtime.prefix_index import Prefix
from martlet.runtime.prefix_store import SUFFIX, PrefixStore
from martlet.runtime.sampling_params import SamplingParams

from ..server.serving import wait_until
from .harness import Answer, ask, run_all
from .scripted import ScriptedExecutor, ScriptedTokenizer, hashed

SYSTEM = [i % 250 for i in range(100)]  # six full blocks of 16


def start(
    folder: Path, fingerprint: bytes = b"model", max_bytes: int = 1 << 20, **executor: Any
) -> tuple[Engine, ScriptedExecutor]:
    store = PrefixStore(folder, fingerprint, max_bytes=max_bytes)
    scripted = ScriptedExecutor(hashed(250), **executor)
    return Engine(scripted, ScriptedTokenizer(), context=256, prefix_store=store), scripted


def answer_of(engine: Engine, prompt: list[int], n: int = 3) -> Answer:
    answer = ask(engine, prompt, max_tokens=n)
    run_all(engine)
    return answer


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_a_restarted_engine_does_not_compute_a_known_prompt(tmp_path: Path) -> None:
    engine, _ = start(tmp_path)
    cold = answer_of(engine, [*SYSTEM, 1])
    engine.close()
    assert len(files(tmp_path)) == 6
    engine, executor = start(tmp_path)
    warm = answer_of(engine, [*SYSTEM, 1])
    assert warm.finish.n_cached == 96
    assert sum(step.n_rows for step in executor.steps) == 101 - 96 + 2
    assert warm.ids == cold.ids
    assert answer_of(engine, [*SYSTEM[:40], 7]).finish.n_cached == 40, "it is in the pool now"
    engine.close()


def test_evicted_blocks_come_back(tmp_path: Path) -> None:
    engine, _ = start(tmp_path, n_blocks=10)
    cold = answer_of(engine, [*SYSTEM, 1])
    answer_of(engine, [9] * 150)
    again = answer_of(engine, [*SYSTEM, 1])
    assert again.finish.n_cached == 96
    assert again.ids == cold.ids
    engine.close()


@pytest.mark.parametrize(
    "other", [{"fingerprint": b"other model"}, {"block_tokens": 8}], ids=["model", "block size"]
)
def test_blocks_of_another_model_are_no_hits(tmp_path: Path, other: dict[str, Any]) -> None:
    engine, _ = start(tmp_path)
    answer_of(engine, SYSTEM)
    engine.close()
    engine, _ = start(tmp_path, **other)
    assert answer_of(engine, SYSTEM).finish.n_cached == 0
    engine.close()


def test_blocks_of_another_model_are_the_reason_of_a_miss(tmp_path: Path) -> None:
    engine, _ = start(tmp_path)
    answer_of(engine, SYSTEM)
    engine.close()
    (tmp_path / "torn.kv").write_bytes(b"MTKV0001")
    engine, _ = start(tmp_path, b"other model")
    misses = []
    for prompt in (SYSTEM, [7] * 40, SYSTEM[:40], [251] * 40):
        request = engine.submit(prompt, SamplingParams(max_tokens=1), lambda event: None)
        run_all(engine)
        misses.append(request.miss)
    assert misses == [("fingerprint", 0), ("differs", 0), None, ("differs", 0)]
    engine.close()


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        damage_middle,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.unlink(),
    ],
    ids=["bit", "short", "empty", "long", "gone"],
)
def test_damaged_files_are_misses_and_are_written_again(tmp_path: Path, damage: Any) -> None:
    engine, _ = start(tmp_path)
    cold = answer_of(engine, [*SYSTEM, 1])
    engine.close()
    for path in files(tmp_path):
        damage(path)
    engine, _ = start(tmp_path)
    again = answer_of(engine, [*SYSTEM, 1])
    assert (again.finish.n_cached, again.ids) == (0, cold.ids)
    engine.close()
    engine, _ = start(tmp_path)
    assert answer_of(engine, [*SYSTEM, 1]).finish.n_cached == 96
    engine.close()


def test_a_block_under_the_digest_of_others_is_not_taken(tmp_path: Path) -> None:
    """B98 on disk: all tokens before it are compared, not only its own."""
    store = PrefixStore(tmp_path, b"m")
    store.save(b"d", lambda: b"first tokens", lambda: b"keys")
    assert store.load(b"d", b"first tokens") == b"keys"
    assert store.load(b"d", b"other tokens") is None
    store.close()


def test_the_folder_stays_below_its_bound_and_loses_ends_before_starts(tmp_path: Path) -> None:
    engine, _ = start(tmp_path)
    answer_of(engine, SYSTEM)
    engine.close()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    for path in files(tmp_path):
        path.unlink()
    bound = sum(sizes) - 1
    engine, _ = start(tmp_path, max_bytes=bound)
    answer_of(engine, SYSTEM)
    engine.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= bound
    engine, _ = start(tmp_path, max_bytes=bound)
    assert answer_of(engine, SYSTEM).finish.n_cached >= 64
    engine.close()


def test_a_block_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, b"m", max_bytes=100)
    store.save(b"d", lambda: b"tokens", lambda: b"k" * 200)
    store.close()
    assert not files(tmp_path)


def test_half_written_files_have_no_known_name_and_those_of_nobody_are_removed(
    tmp_path: Path,
) -> None:
    fcntl = pytest.importorskip("fcntl")
    for name in ("written.1.partial", "left.1.partial"):
        (tmp_path / name).write_bytes(b"half")
    with (tmp_path / "written.1.partial").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        PrefixStore(tmp_path, b"m").close()
        assert [path.name for path in tmp_path.iterdir()] == ["written.1.partial"]
    PrefixStore(tmp_path, b"m").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), MemoryError()])
def test_a_disk_that_refuses_costs_blocks_and_comes_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    engine, _ = start(tmp_path, n_blocks=10)
    store = engine._tier.store if engine._tier else None
    assert store

    def refuse(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        for first in range(8):
            assert answer_of(engine, [first, *SYSTEM]).finish.reason == "length"
        engine.scheduler.pool.save()
        store.wait()
        wait_until(lambda: not store._pending)
    assert list(tmp_path.iterdir()) == []
    assert store.n_lost > 6
    assert caplog.text.count("is not kept") == 1, "once for as long as it lasts"
    assert answer_of(engine, [*SYSTEM, 1]).finish.reason == "length"
    engine.close()
    assert len(files(tmp_path)) >= 6


def test_a_folder_that_goes_while_it_is_used_costs_blocks(tmp_path: Path) -> None:
    engine, _ = start(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert answer_of(engine, [*SYSTEM, 1]).finish.reason == "length"
    engine.close()


def test_a_folder_that_cannot_be_had_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MartletError, match="choose another folder"):
        PrefixStore(tmp_path / "file", b"m")


def test_an_executor_that_cannot_save_blocks_is_refused_by_name(tmp_path: Path) -> None:
    class Plain:
        name, max_rows, block_tokens, n_blocks, n_states, sees_ahead = "plain", 8, 16, 4, 0, False

    store = PrefixStore(tmp_path, b"m")
    with pytest.raises(UnsupportedError, match="executor plain cannot save blocks"):
        Engine(Plain(), ScriptedTokenizer(), context=64, prefix_store=store)  # type: ignore[arg-type]
    store.close()


def test_a_block_the_executor_refuses_is_a_miss(tmp_path: Path) -> None:
    engine, _ = start(tmp_path)
    cold = answer_of(engine, SYSTEM)
    engine.close()
    engine, executor = start(tmp_path)

    def refuse(block: int, data: bytes, window_block: int) -> None:
        raise MartletError("no")

    executor.write_block = refuse  # type: ignore[method-assign]
    again = answer_of(engine, SYSTEM)
    assert (again.finish.n_cached, again.ids) == (0, cold.ids)
    engine.close()


def test_a_prefix_is_kept_with_all_its_tokens(tmp_path: Path) -> None:
    engine, _ = start(tmp_path)
    answer_of(engine, SYSTEM)
    seen: list[Prefix] = list(engine.scheduler.pool._index)
    last = max(seen, key=lambda prefix: len(prefix_tokens(prefix)))
    assert prefix_tokens(last) == np.array(SYSTEM[:96], "<i4").tobytes()
    engine.close()


def prefix_tokens(prefix: Prefix | None) -> bytes:
    return prefix_tokens(prefix.parent) + prefix.content if prefix else b""


PROMPTS = st.lists(
    st.one_of(
        st.integers(1, 60).map(lambda n: SYSTEM[:n]),
        st.tuples(st.integers(0, 60), st.integers(0, 3)).map(lambda p: SYSTEM[: p[0]] + [p[1]] * 9),
    ),
    min_size=1,
    max_size=6,
)


@given(
    lives=st.lists(PROMPTS, min_size=2, max_size=4),
    n_blocks=st.integers(19, 30),
    window=st.sampled_from([0, 1, 6]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_answers_are_those_without_a_cache_through_many_lives(
    tmp_path: Path, lives: list[list[list[int]]], n_blocks: int, window: int
) -> None:
    """Saved and reloaded, small pools, a bound that cuts: the script reads every slot back."""
    sizes = {"n_blocks": n_blocks, "block_tokens": 4, "window": window}
    sizes["n_window_blocks"] = min(n_blocks, 20)
    for path in files(tmp_path):
        path.unlink()
    for prompts in lives:
        engine, _ = start(tmp_path, max_bytes=4000, **sizes)
        answers = [ask(engine, prompt, max_tokens=4) for prompt in prompts]
        run_all(engine)
        engine.close()
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = list(prompt)
            for _ in range(4):
                tokens.append(int(hashed(250)(np.array(tokens, np.int32))))
            assert answer.ids == tokens[len(prompt) :]
