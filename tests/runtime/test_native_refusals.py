"""What the native executor refuses before anything runs, with numbers: steps that would leave their
arrays, instruction sets the machine lacks, a closed executor, a library that is not one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.native_library import Library, NativeUnavailable
from martlet.runtime.step import Step

from ..recorded import recorded_model
from .native_library import ISAS, LIBRARY
from .tiny import Chunk, TinyDims, TinyModel, make_step, run_tokens, tiny_model

VOCAB_SIZE = 40
MAX_ROWS = 16
N_BLOCKS = 4
BLOCK_TOKENS = 16
MODEL = tiny_model(
    dims=TinyDims(dim=64, ffn_dim=64, head_dim=16, n_layers=1, vocab_size=VOCAB_SIZE)
)


def new_executor(**where: object) -> NativeExecutor:
    sizes = {"n_blocks": N_BLOCKS, "block_tokens": BLOCK_TOKENS, "n_threads": 1}
    return NativeExecutor(MODEL.plan(MAX_ROWS), MODEL.weights, **{**sizes, **where})


@pytest.fixture
def executor() -> Iterator[NativeExecutor]:
    executor = new_executor()
    yield executor
    executor.close()


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GOOD = make_step([Chunk([1, 2, 3], 5, [0, 3]), Chunk([4], 20, [1, 2])])

REFUSED = {
    "token above": ({"tokens": ints(1, 2, 40, 4)}, "token 40 of row 2 .* vocabulary of 40"),
    "token below": ({"tokens": ints(1, -1, 3, 4)}, "token -1 of row 1"),
    "position past the table": ({"positions": ints(5, 6, 7, 32)}, "position 32 of row 3 .* 32"),
    "position below": ({"positions": ints(-1, 0, 1, 20)}, "position -1 of row 0"),
    "position of 2^31 - 1": ({"positions": ints(5, 6, 7, 2**31 - 1)}, "position 2147483647"),
    "positions with a gap": ({"positions": ints(5, 6, 8, 20)}, "rows 1 and 2 .* not neighbours"),
    "positions that fall": ({"positions": ints(5, 4, 3, 20)}, "rows 0 and 1 .* not neighbours"),
    "block above": ({"block_table": np.array([[0, 3], [1, 4]], np.int32)}, "block 1 .* is 4.* 4"),
    "block below": ({"block_table": np.array([[-1, 3], [1, 2]], np.int32)}, "block 0 .* is -1"),
    "rows of nobody": ({"seq_start": ints(1, 3, 4)}, "rows 1 to 4 of 4"),
    "too few rows": ({"seq_start": ints(0, 3, 3)}, "rows 0 to 3 of 4"),
    "an empty sequence": ({"seq_start": ints(0, 0, 4)}, "sequence 0 covers no rows"),
    "falling sequences": ({"seq_start": ints(0, 9, 4)}, "sequence 0 covers no rows"),
    "hidden row above": ({"hidden_rows": ints(4)}, "hidden state 0 is of row 4 of 4"),
    "hidden row below": ({"hidden_rows": ints(-1)}, "hidden state 0 is of row -1"),
    "too many hidden rows": ({"hidden_rows": ints(*[0] * 5)}, "5 hidden states of 4 rows"),
    "output row above": ({"out_rows": ints(4)}, "output 0 wants row 4 of 4"),
    "output row below": ({"out_rows": ints(0, -1)}, "output 1 wants row -1"),
    "more outputs than rows": ({"out_rows": ints(0, 1, 2, 3, 3)}, "5 outputs"),
    "fewer positions": ({"positions": ints(5, 6, 7)}, "4 tokens.* 3 positions"),
    "more positions": ({"positions": ints(5, 6, 7, 8, 9)}, "4 tokens.* 5 positions"),
    "fewer starts": ({"seq_start": ints(0, 4)}, "2 block tables.* 2 starts"),
    "fewer segments": ({"segments": ints(0)}, "4 tokens.* 1 segments"),
    "flat table": ({"block_table": ints(0, 3)}, "block table"),
    "wide integers": ({"tokens": np.array([1, 2, 3, 4])}, "int64"),
    "strided": ({"tokens": np.arange(8, dtype=np.int32)[::2]}, "contiguous"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_leaves_its_arrays_is_refused(executor: NativeExecutor, case: str) -> None:
    changed, message = REFUSED[case]
    expected = executor.run(GOOD)
    with pytest.raises(ModelError, match=message):
        executor.run(replace(GOOD, **changed))
    np.testing.assert_array_equal(executor.run(GOOD), expected)


RECURRENT = TinyModel(*recorded_model("lfm2", "Q8_0"))
GUESSING = {
    "a slot above": ({"states": ints(0, 2)}, "state of sequence 1 is 2, there are 2"),
    "one slot for two": ({"states": ints(1, 1)}, "sequences 0 and 1 share state 1"),
    "guesses alone": ({"guesses": ints(3, 0)}, "3 of 3 rows of sequence 0 are guesses"),
    "fewer than none": ({"guesses": ints(0, -1)}, "-1 of 1 rows of sequence 1"),
    "more than are kept": ({"replays": ints(0, 3)}, "3 guesses were right .* 20 .* at most 2"),
    "before the start": ({"positions": ints(2, 3, 4, 20), "replays": ints(2, 0)}, "2 guesses were"),
    "a negative replay": ({"replays": ints(-1, 0)}, "-1 guesses were right"),
    "a short array": ({"replays": ints(0)}, "2 sequences, but 1 replays"),
}


def test_guesses_that_states_have_no_room_for_are_refused() -> None:
    sizes = {"n_blocks": N_BLOCKS, "block_tokens": BLOCK_TOKENS, "n_threads": 1, "n_guesses": 2}
    executor = NativeExecutor(RECURRENT.plan(MAX_ROWS), RECURRENT.weights, n_states=2, **sizes)
    good = replace(GOOD, guesses=ints(2, 0))
    for changed, message in GUESSING.values():
        executor.run(good)
        with pytest.raises(ModelError, match=message):
            executor.run(replace(good, **changed))
    executor.close()
    with pytest.raises(ModelError, match="65 guessed rows of a sequence: use 0 to 64"):
        NativeExecutor(RECURRENT.plan(MAX_ROWS), RECURRENT.weights, **{**sizes, "n_guesses": 65})


def test_too_many_rows_are_refused(executor: NativeExecutor) -> None:
    step = make_step([Chunk([1] * (MAX_ROWS + 1), 0, range(4))])
    with pytest.raises(ModelError, match=r"17 rows.* at most 16"):
        executor.run(step)


def test_no_rows_are_refused(executor: NativeExecutor) -> None:
    none = ints()
    with pytest.raises(ModelError, match="0 rows"):
        executor.run(Step(none, none, ints(0), np.zeros((0, 1), np.int32), none))


def test_a_table_that_repeats_blocks_reaches_no_further_than_the_pool(
    executor: NativeExecutor,
) -> None:
    """Scratch is sized for the pool's positions, so a longer sequence must not get in."""
    step = make_step([Chunk([1], N_BLOCKS * BLOCK_TOKENS, [0] * 100)])
    with pytest.raises(ModelError, match=r"position 64 .* 64"):
        executor.run(step)


@pytest.mark.parametrize(("src", "dst"), [(-1, 0), (0, -1), (N_BLOCKS, 0), (0, N_BLOCKS)])
def test_blocks_outside_the_pool_are_not_copied(
    executor: NativeExecutor, src: int, dst: int
) -> None:
    with pytest.raises(ModelError, match=rf"copy block {src} to {dst}.* 4"):
        executor.copy_block(src, dst)


def test_a_closed_executor_says_so() -> None:
    executor = new_executor()
    executor.close()
    executor.close()
    for call in (lambda: executor.run(GOOD), lambda: executor.copy_block(0, 1)):
        with pytest.raises(ModelError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"block_tokens": 24}, "24 tokens.* multiple of 16"),
        ({"n_blocks": 0}, "0 of them"),
        ({"n_threads": 100_000}, "100000 threads"),
        ({"kv_type": 7}, "KV type 7"),
        ({"n_blocks": 2**31 - 1}, "pool|memory"),
    ],
)
def test_sizes_no_machine_has_are_refused(where: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        new_executor(**where)


# -- instruction sets ---------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_an_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARTLET_ISA", isa)
    executor = new_executor()
    assert executor.isa == isa
    executor.close()


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARTLET_ISA", "no-such-isa")
    executor = new_executor(isa="scalar")
    assert executor.isa == "scalar"
    executor.close()


def test_without_a_word_the_best_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARTLET_ISA", raising=False)
    executor = new_executor()
    assert executor.isa == ISAS[-1] == LIBRARY.best_isa()
    executor.close()


def test_an_unknown_isa_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARTLET_ISA", "sse9")
    with pytest.raises(ModelError, match=r"'sse9'.*scalar"):
        new_executor()


def test_an_isa_above_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B112: by name, with what the machine has, and without running an instruction of it."""
    monkeypatch.setattr(Library, "isas", lambda self: iter([("scalar", True), ("wide", False)]))
    with pytest.raises(ModelError, match="cannot run kernels for wide; its best is"):
        new_executor(isa="wide")


def test_c_refuses_what_python_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "isa_index", lambda self, name: 99)
    with pytest.raises(ModelError, match="ISA 99"):
        new_executor()


# -- the library itself -------------------------------------------------------------------------


def test_the_environment_names_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARTLET_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(NativeUnavailable, match=r"MARTLET_LIBRARY.*none\.so"):
        Library()
    (tmp_path / "text.so").write_text("no library")
    (tmp_path / "martlet.h").write_text("/* ---- cffi begins ---- */ /* ---- cffi ends ---- */")
    monkeypatch.setenv("MARTLET_LIBRARY", str(tmp_path / "text.so"))
    with pytest.raises(NativeUnavailable, match=r"text\.so does not load"):
        Library()


def test_libraries_share_no_lock() -> None:
    """An FFI is locked while it opens a library: garbage of another executor may end then."""
    assert Library().ffi is not Library().ffi


def test_a_refused_step_leaves_earlier_keys_alone(executor: NativeExecutor) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = run_tokens(executor, tokens)
    run_tokens(executor, tokens[:4])
    with pytest.raises(ModelError):
        executor.run(make_step([Chunk([8, 8, 99], 1, [0])]))
    np.testing.assert_array_equal(
        executor.run(make_step([Chunk(tokens[4:], 4, [0])])), expected[4:]
    )
