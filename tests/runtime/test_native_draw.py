"""The library's draw: the same tokens as the NumPy one, the same bits on every ISA."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from martlet.runtime.constraint import Allowed, allowed_of
from martlet.runtime.engine import Engine
from martlet.runtime.executors.native_draw import NativeDrawer
from martlet.runtime.sampling import NUMPY, Drawer, NumpyDrawer, SamplingParams, sample

from .harness import ask, engine_of, run_all
from .native_library import ISAS, LIBRARY
from .scripted import ScriptedTokenizer

# Around a vector, around a run of sums, and many runs with a part of one.
SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 5001, 49_152)
TERMS = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.0},
    {"top_p": 0.95},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.3, "min_p": 1e-60},
)
NO_TOKENS = np.array([0], np.int32)


def drawer_of(isa: str | None = None) -> NativeDrawer:
    return NativeDrawer(LIBRARY.ffi, LIBRARY.lib, LIBRARY.isa_index(isa))


def rows_of(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    rows = {
        "peaked": rng.normal(0, 4, n),
        "flat": rng.normal(0, 0.05, n),
        "equal": np.zeros(n),
        "ties": rng.integers(-3, 3, n),
        "removed": np.where(rng.random(n) < 0.9, -math.inf, rng.normal(0, 2, n)),
        "far apart": np.where(np.arange(n) == n // 2, 50, rng.normal(-50, 9, n)),
    }
    rows["removed"][n // 3] = 1.0
    return {name: row.astype(np.float32) for name, row in rows.items()}


def masks_of(n: int) -> dict[str, np.ndarray]:
    """Around a word, around a run, and what grammars leave: nearly all, or a few."""
    rng = np.random.default_rng(n)
    ids = np.arange(n)
    return {
        "nearly all": rng.random(n) < 0.98,
        "half": rng.random(n) < 0.5,
        "a few": rng.random(n) < 0.002,
        "all": np.ones(n, bool),
        "the last": ids == n - 1,
        "one run": (ids >= 256) & (ids < 512),
        "a word and a bit": (ids >= 32) & (ids <= 64),
    }


def drawn(
    logits: np.ndarray,
    drawer: Drawer,
    seed: int,
    terms: dict[str, Any],
    allowed: Allowed | None = None,
) -> int:
    return sample(
        logits,
        SamplingParams(**terms),
        seed=seed,
        n_prompt=1,
        tokens=NO_TOKENS,
        allowed=allowed,
        drawer=drawer,
    )


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_the_tokens_are_those_of_numpy(n: int, terms: dict[str, Any]) -> None:
    drawer = drawer_of()
    for name, logits in rows_of(n).items():
        for seed in range(12):
            expected = drawn(logits, NUMPY, seed, terms)
            assert drawn(logits, drawer, seed, terms) == expected, (name, seed)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_and_tokens_are_the_same_bits_on_every_isa(isa: str) -> None:
    first, other = drawer_of(ISAS[0]), drawer_of(isa)
    for n in (17, 5001):
        for terms in TERMS[:4]:
            for logits in rows_of(n).values():
                assert drawn(logits, first, 1, terms) == drawn(logits, other, 1, terms)
                assert (first.weights(n) == other.weights(n)).all()


@pytest.mark.parametrize("n", [*SIZES, 31, 33, 64])
def test_under_a_mask_the_tokens_are_those_of_numpy(n: int) -> None:
    drawer = drawer_of()
    for name, logits in rows_of(n).items():
        for kind, flags in masks_of(n).items():
            allowed = allowed_of(flags)
            allowed[-1] |= np.uint32(0xFFFFFFFF << (n - 1) % 32 << 1 & 0xFFFFFFFF)  # mean nothing
            where = name, kind
            kept = np.where(flags, logits, np.float32(-math.inf))
            assert (drawer.mask(logits, allowed) == kept).all(), where
            assert drawer.best(logits, allowed) == NUMPY.best(logits, allowed), where
            if kept.max() == -math.inf:
                continue
            for terms in (*TERMS[:4], {"min_p": 0.05}, {"top_k": 7}, {"temperature": 0}):
                expected = drawn(logits, NUMPY, 3, terms, allowed)
                assert drawn(logits, drawer, 3, terms, allowed) == expected, (where, terms)
                # What is not allowed weighs nothing, to the bit.
                assert drawn(kept, drawer, 3, terms) == expected, (where, terms)


def test_a_mask_of_another_length_is_refused() -> None:
    logits = rows_of(257)["peaked"]
    short = allowed_of(np.ones(256, bool))
    for call in (drawer_of().best, drawer_of().mask):
        with pytest.raises(AssertionError):
            call(logits, short)
    with pytest.raises(AssertionError):
        drawn(logits, drawer_of(), 0, {}, short)


def test_weights_are_exponentials() -> None:
    drawer, logits = drawer_of(), rows_of(5001)["peaked"]
    drawn(logits, drawer, 0, {"temperature": 0.5})
    expected = np.exp((logits.astype(np.float64) - logits.max()) / 0.5)
    np.testing.assert_allclose(drawer.weights(5001), expected, rtol=4e-6, atol=1e-37)


def test_among_equals_at_the_edge_the_lower_ids_stay() -> None:
    drawer, logits = drawer_of(), np.zeros(1000, np.float32)
    tokens = {drawn(logits, drawer, seed, {"top_p": 0.01}) for seed in range(300)}
    assert tokens == set(range(10))


def test_a_row_of_which_only_one_token_is_left() -> None:
    logits = np.full(600, -math.inf, np.float32)
    logits[599] = -3.0
    for terms in TERMS:
        assert drawn(logits, drawer_of(), 5, terms) == 599


def test_the_engine_draws_by_its_executor() -> None:
    asked: list[float] = []

    class Counted(NumpyDrawer):
        def __call__(self, *args: Any, **options: Any) -> int:
            asked.append(args[3])
            return 66

    plain, executor = engine_of(eog_ids=())
    greedy = ask(plain, [2], max_tokens=3)
    run_all(plain)
    executor.drawer = Counted()  # type: ignore[attr-defined]
    engine = Engine(executor, ScriptedTokenizer(eog_ids=()), context=64)
    drawn_by_it, best = (
        ask(engine, [1], temperature=1.0, max_tokens=3),
        ask(engine, [2], max_tokens=3),
    )
    run_all(engine)
    assert drawn_by_it.ids == [66] * 3
    assert len(set(asked)) == 3
    assert best.ids == greedy.ids, "the best token needs no draw"
