"""Prompt rows beside streams: the step's time stays near its target on any machine."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import ModelError
from martlet.runtime.pace import MEASURE_EVERY, MIN_ROWS, UNLIMITED, Pace

from .harness import ask, engine_of
from .scripted import hashed


class Machine:
    """Takes base_s per step, stream_s per stream, row_s per prompt row and fixed_s for any."""

    def __init__(
        self, base_s: float, stream_s: float, row_s: float, fixed_s: float, pace: Pace
    ) -> None:
        self.base_s, self.stream_s, self.row_s, self.fixed_s = base_s, stream_s, row_s, fixed_s
        self.pace = pace

    def step(
        self, n_streams: int, n_wanted: int = UNLIMITED, n_short: int = 0
    ) -> tuple[int, float]:
        rows = min(self.pace.prompt_rows(n_streams, n_short), n_wanted, 256)
        seconds = self.base_s + n_streams * self.stream_s + rows * self.row_s
        seconds += self.fixed_s if rows else 0
        self.pace.observe(n_streams, rows, seconds)
        return rows, seconds


@given(
    base_s=st.floats(1e-4, 1.0),
    stream=st.floats(0.0, 1.0),
    row=st.floats(0.001, 3.0),
    fixed=st.floats(0.0, 0.4),
    n_streams=st.integers(1, 32),
    first_chunk=st.booleans(),
)
def test_the_gap_of_a_stream_at_most_doubles_and_prompts_always_move(
    base_s: float, stream: float, row: float, fixed: float, n_streams: int, first_chunk: bool
) -> None:
    machine = Machine(base_s, base_s * stream, base_s * row, base_s * fixed, Pace())
    if first_chunk:
        machine.step(0)
    alone_s = machine.step(n_streams, 0)[1]
    seen = [machine.step(n_streams) for _ in range(60)]
    assert all(rows >= MIN_ROWS for rows, _ in seen)
    floor_s = alone_s + machine.fixed_s + MIN_ROWS * machine.row_s
    for rows, seconds in seen[30:]:
        assert seconds <= max(2.1 * alone_s, 1.01 * floor_s)
        room_s = 1.9 * alone_s - machine.fixed_s - alone_s
        assert rows >= min(256, int(0.7 * room_s / machine.row_s) - 1), "it uses what it may"


def test_the_first_rows_beside_streams_are_few_and_then_double() -> None:
    machine = Machine(1.0, 0.0, 0.001, 0.0, Pace())
    machine.step(0)
    rows = [machine.step(1)[0] for _ in range(8)]
    assert rows[0] == 0, "the stream is measured alone"
    assert rows[1:6] == [8, 16, 32, 64, 128]


def test_a_number_of_streams_is_measured_alone_once_and_again_after_a_while() -> None:
    machine = Machine(0.01, 0.001, 0.001, 0.0, Pace())
    rows = [machine.step(3)[0] for _ in range(2 * MEASURE_EVERY + 4)]
    assert [i for i, n in enumerate(rows) if n == 0] == [
        0,
        MEASURE_EVERY + 1,
        2 * MEASURE_EVERY + 2,
    ]
    assert machine.step(2)[0] == 0


def test_a_target_by_hand_replaces_the_derived_one_and_holds_without_streams() -> None:
    machine = Machine(0.01, 0.001, 0.001, 0.0, Pace(step_ms=50))
    without = [machine.step(0)[1] for _ in range(40)]
    assert without[-1] == pytest.approx(0.05, rel=0.25)
    beside = [machine.step(4)[1] for _ in range(40)]
    assert beside[-1] == pytest.approx(0.05, rel=0.1)


def test_without_streams_or_target_nothing_is_held_back() -> None:
    assert Pace().prompt_rows(0, 5) == UNLIMITED


def test_short_prompts_outweigh_streams_and_many_of_them_more() -> None:
    machine = Machine(0.01, 0.0, 0.001, 0.0, Pace())
    machine.step(2, 0)
    for n_short, stretched in ((0, 2), (1, 8), (8, 8), (12, 12), (1000, 16)):
        seconds = [machine.step(2, n_short=n_short)[1] for _ in range(20)][-1]
        assert seconds == pytest.approx(0.01 * stretched, rel=0.05)


def test_one_slow_step_does_not_starve_prompts() -> None:
    machine = Machine(0.01, 0.0, 0.001, 0.0, Pace())
    for _ in range(20):
        rows, _ = machine.step(1)
    machine.pace.observe(1, 10, 100.0)
    assert machine.step(1)[0] >= rows // 2


def test_the_engine_keeps_streams_going_while_a_long_prompt_comes_in() -> None:
    """Steps take time by rows: 5 ms and 1 ms a row. A prompt of 200 rows is cut small."""
    engine, executor = engine_of(hashed(250), context=512, executor={"max_rows": 64})
    executor.on_step = lambda step: time.sleep(0.005 + 0.001 * step.n_rows)
    stream = ask(engine, [1], max_tokens=300)
    for _ in range(4):
        engine.step()
    prompt = ask(engine, [2] * 200, max_tokens=1)
    while not prompt.end:
        engine.step()
    mixed = [step.n_rows for step in executor.steps if step.n_rows > 1]
    assert max(mixed) < 33, "64 would have fitted the executor"
    assert stream.end is None


@pytest.mark.parametrize("step_ms", [0, -1, float("nan")])
def test_targets_that_no_step_can_meet_are_refused(step_ms: float) -> None:
    with pytest.raises(ModelError, match="step_ms"):
        engine_of(step_ms=step_ms)
