"""When threads worked on ops, as the native executor tells a trace."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.timeline import Timeline, op_name
from martlet.runtime.trace_file import TraceFile

from .native_library import LIBRARY
from .tiny import Chunk, TinyModel, make_step, tiny_model


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", formats=("Q4_K",))


STEPS = (make_step([Chunk([1, 2, 3], 0, [0])]), make_step([Chunk([4], 3, [0])], []))


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_spans_lie_in_their_step_in_the_order_of_the_plan(model: TinyModel, n_threads: int) -> None:
    plan = model.plan()
    executor = NativeExecutor(plan, model.weights, n_blocks=4, n_threads=n_threads)
    spans = executor.trace_ops()
    assert spans.shape == (n_threads, len(plan.ops), 2)
    for step in STEPS:
        start_ns = time.monotonic_ns()
        executor.run(step)
        end_ns = time.monotonic_ns()
        starts, ends = spans[..., 0], spans[..., 1]
        assert start_ns <= starts.min()
        assert ends.max() <= end_ns
        assert (ends >= starts).all()
        assert (starts[:, 1:] >= ends[:, :-1]).all()
        # Nobody begins an op before all of the one before it is done.
        assert (starts[:, 1:].min(axis=0) >= starts[:, :-1].min(axis=0)).all()
    executor.close()


def test_ops_without_rows_take_no_time_and_tracing_changes_no_number(model: TinyModel) -> None:
    plan = model.plan()
    plain, traced = (NativeExecutor(plan, model.weights, n_blocks=4, n_threads=2) for _ in "12")
    spans = traced.trace_ops()
    for step in STEPS:
        np.testing.assert_array_equal(traced.run(step), plain.run(step))
    logits = next(i for i, op in enumerate(plan.ops) if plan.buffers[op.out].is_logits)
    assert (spans[:, logits, 1] == spans[:, logits, 0]).all()  # the last step wants none
    assert (spans[:, 0, 1] > 0).all()
    plain.close()
    traced.close()


def test_a_trace_has_a_track_for_each_thread(model: TinyModel, tmp_path: Path) -> None:
    plan = model.plan()
    file = TraceFile(tmp_path / "t.json")
    executor = NativeExecutor(plan, model.weights, n_blocks=4, n_threads=2)
    traced = Timeline(file, "tiny").traced(executor, plan)
    traced.run(STEPS[0])
    traced.close()
    file.close()
    events = json.loads(file.path.read_bytes())["traceEvents"]
    (step,) = (each for each in events if each["name"] == "step")
    ops = [each for each in events if each.get("cat") == "op"]
    names = [op_name(plan, op) for op in plan.ops]
    assert {each["tid"] for each in ops} == {1, 2}
    for thread in (1, 2):
        left = iter(names)  # in their order, and none twice
        assert all(each["name"] in left for each in ops if each["tid"] == thread)
    for op in ops:
        assert step["ts"] <= op["ts"]
        assert op["ts"] + op["dur"] <= step["ts"] + step["dur"] + 0.01
    tracks = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert tracks == {"engine", "thread 0", "thread 1"}
    assert LIBRARY.lib.mt_sizeof(10) == 16
