"""What loading takes against what is there: packed, without a copy, or refused with the numbers."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime import model as model_module
from martlet.runtime.errors import NotEnoughMemory
from martlet.runtime.machine import Memory
from martlet.runtime.memory_fit import REQUEST_BYTES, Need, choose_repack
from martlet.runtime.model import Model, load_model

from ..recorded import gguf_of
from .native_library import ISAS  # skips the file where there is no native library

MB = 10**6
NEED = Need(packed_bytes=100 * MB, raw_bytes=20 * MB)


def choice(free: int, repack: bool | None = None, *, swap: int = 0, file: int = 90 * MB) -> object:
    return choose_repack(NEED, Memory(10**9, free, swap), repack, file_bytes=file)


def test_a_copy_is_kept_where_it_fits() -> None:
    assert choice(100 * MB + REQUEST_BYTES) == (True, "")
    assert choice(10**9, repack=False) == (False, "")


def test_without_room_for_it_the_file_is_read_and_that_is_said() -> None:
    packs, why = choice(100 * MB + REQUEST_BYTES - 1, file=10 * MB)  # type: ignore[misc]
    assert not packs
    for part in ("--no-repack", "takes 80 MB"):
        assert part in why
    assert "disk" not in why
    assert "the 90 MB of the file do not fit" in choice(100 * MB)[1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("repack", "needed", "hint"),
    [(True, 100 * MB, "ask for --no-repack, a smaller"), (None, 20 * MB, "ask for a smaller")],
)
def test_what_cannot_fit_is_refused_with_both_numbers(
    repack: bool | None, needed: int, hint: str
) -> None:
    with pytest.raises(NotEnoughMemory, match=hint) as error:
        choice(8 * MB, repack=repack)
    assert error.value.needed_bytes == needed + REQUEST_BYTES
    assert error.value.available_bytes == 8 * MB
    for part in (str(needed + REQUEST_BYTES), str(8 * MB), "--kv-bytes", "--context"):
        assert part in str(error.value)


def test_swap_may_be_asked_for_and_is_not_chosen() -> None:
    assert choice(60 * MB, repack=True, swap=80 * MB) == (True, "")
    assert choice(60 * MB, swap=80 * MB)[0] is False  # type: ignore[index]


def test_guessed_and_unknown_memory_refuse_nothing_that_may_fit() -> None:
    guess = Memory(150 * MB, 75 * MB, is_measured=False)
    assert choose_repack(NEED, guess, True, file_bytes=0) == (True, "")
    assert choose_repack(NEED, Memory(0, 0), None, file_bytes=0) == (True, "")


sizes = st.integers(0, 10**9)


@given(raw=sizes, more=sizes, free=sizes, swap=sizes, repack=st.sampled_from([None, True, False]))
def test_nothing_is_loaded_that_the_system_cannot_hold(
    raw: int, more: int, free: int, swap: int, repack: bool | None
) -> None:
    need, found = Need(raw + more, raw), Memory(2 * 10**9, free, swap)
    least = (need.packed_bytes if repack else need.raw_bytes) + REQUEST_BYTES
    if least > free + swap:
        with pytest.raises(NotEnoughMemory):
            choose_repack(need, found, repack, file_bytes=0)
        return
    packs, why = choose_repack(need, found, repack, file_bytes=0)
    assert (need.packed_bytes if packs else need.raw_bytes) + REQUEST_BYTES <= free + swap
    assert repack in (None, packs)
    assert bool(why) == (repack is None and not packs)


@pytest.mark.skipif(not ISAS, reason="no native library")
def test_load_model_asks_before_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, how = gguf_of("llama"), {"context": 64, "kv_bytes": 1 << 20, "executor": "native"}
    free = REQUEST_BYTES + (1 << 20)
    monkeypatch.setattr(model_module, "memory", lambda: Memory(10**9, free))
    with pytest.raises(NotEnoughMemory, match=r"\d+ bytes of memory are needed, \d+ are available"):
        load_model(path, **how)
    with pytest.raises(NotEnoughMemory) as error:
        load_model(path, **how, repack=True)
    free = error.value.needed_bytes - 1
    with caplog.at_level(logging.WARNING), load(path, how) as model:
        assert not model.executor.repack  # type: ignore[attr-defined]
    assert "--no-repack" in caplog.text
    free += 1
    with load(path, how) as model:
        assert model.executor.repack  # type: ignore[attr-defined]


def load(path: Path, how: dict[str, object]) -> contextlib.closing[Model]:
    return contextlib.closing(load_model(path, **how))  # type: ignore[arg-type]
