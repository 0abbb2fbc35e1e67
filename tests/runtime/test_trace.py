"""The trace: whole JSON at any moment, and what the engine and the native executor write there."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.timeline import Timeline, op_name
from martlet.runtime.trace_file import TraceFile, event

from .harness import ask, engine_of, run_all
from .tiny import Chunk, make_step, tiny_model


def events_of(path: Path, phase: str | None = None) -> list[dict]:
    found = json.loads(path.read_bytes())["traceEvents"]
    return [each for each in found if phase in (None, each["ph"])]


@given(texts=st.lists(st.text(max_size=40), max_size=20), max_bytes=st.integers(400, 2000))
def test_the_file_is_whole_after_every_event(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], max_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    file = TraceFile(path, max_bytes=max_bytes)
    file._is_due = lambda: True  # type: ignore[method-assign]  # every event reaches the disk
    for i, text in enumerate(texts):
        was_closed = file.is_closed
        file.add([event(ph="i", name=text)])
        names = [each["name"] for each in events_of(path)][1:]
        if file.is_closed:
            n = len(names) - 1
            assert names == [*texts[:n], f"the trace ends here: {max_bytes} bytes"]
            assert n == i or was_closed
        else:
            assert names == texts[: i + 1]
    file.close()
    assert path.stat().st_size < max_bytes + 200


def test_what_waits_is_written_at_the_end_and_when_it_is_old(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    file.add([event(ph="i", name="a")])
    assert len(events_of(file.path)) == 1
    file._flushed_s -= 10
    file.add([event(ph="i", name="b")])
    assert [each["name"] for each in events_of(file.path)] == ["process_name", "a", "b"]
    file.add([event(ph="i", name="c")])
    file.close()
    file.close()
    file.add([event(ph="i", name="too late")])
    assert [each["name"] for each in events_of(file.path)[1:]] == ["a", "b", "c"]


def test_a_disk_that_is_full_costs_the_trace_alone(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    file._file.close()
    file._flushed_s -= 10

    class Full:
        def seek(self, at: int) -> None: ...
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    file._file = Full()  # type: ignore[assignment]
    file.add([event(ph="i", name="a")])
    assert file.is_closed


def test_threads_take_turns(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    timelines = [Timeline(file, f"model {i}") for i in range(3)]

    def work(timeline: Timeline) -> None:
        for i in range(200):
            with timeline.span("x", i=i):
                pass

    threads = [threading.Thread(target=work, args=(each,)) for each in timelines]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    file.close()
    by_process = defaultdict(list)
    for each in events_of(file.path, "X"):
        by_process[each["pid"]].append(each["args"]["i"])
    assert dict(by_process) == {pid: list(range(200)) for pid in (1, 2, 3)}


def test_requests_and_steps_of_an_engine(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    timeline = Timeline(file, "scripted")
    engine, executor = engine_of(timeline=timeline, eog_ids=())
    engine._executor = timeline.traced(executor, tiny_model("llama").plan())
    prompts = {"a": [1, 2, 3], "b": [4, 5]}
    answers = [ask(engine, p, request_id=name, max_tokens=4) for name, p in prompts.items()]
    run_all(engine)
    file.close()
    spans = events_of(file.path, "X")
    steps = [each for each in spans if each["name"] == "step"]
    assert len(steps) == engine.stats().steps == 4
    assert [each["args"]["rows"] for each in steps] == [5, 2, 2, 2]
    # schedule, step and draw follow each other.
    names = [each["name"] for each in sorted(spans, key=lambda each: each["ts"])]
    assert names[:6] == ["schedule", "step", "draw"] * 2
    ends = [each["ts"] + each["dur"] for each in sorted(spans, key=lambda each: each["ts"])]
    assert ends == sorted(ends)
    for name, answer in zip("ab", answers, strict=True):
        begun = {e["name"]: e for e in events_of(file.path, "b") if e["id"] == name}
        ended = {e["name"]: e["ts"] for e in events_of(file.path, "e") if e["id"] == name}
        assert list(begun) == ["request", "queue", "prefill", "decode"]
        timings = answer.finish.timings
        lasted = {key: (ended[key] - each["ts"]) / 1e3 for key, each in begun.items()}
        assert lasted["queue"] == pytest.approx(timings.queue_ms, abs=1e-3)
        assert lasted["prefill"] == pytest.approx(timings.prefill_ms, abs=1e-3)
        assert lasted["decode"] == pytest.approx(timings.decode_ms, abs=1e-3)
        assert begun["decode"]["ts"] == pytest.approx(ended["prefill"], abs=1e-2)
        assert begun["request"]["args"]["output_tokens"] == 4
        assert ended["request"] == ended["decode"]


def test_the_executor_behind_a_trace_is_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = model.plan()
    executor = ReferenceExecutor(plan, model.weights, n_blocks=4)
    file = TraceFile(tmp_path / "t.json")
    traced = Timeline(file, "tiny").traced(executor, plan)
    step = make_step([Chunk([1, 2, 3], 0, [0])])
    np.testing.assert_array_equal(traced.run(step), executor.run(step))
    assert (traced.name, traced.n_blocks) == (executor.name, executor.n_blocks)
    assert traced.hidden is executor.hidden
    assert not hasattr(traced, "read_block")
    file.close()
    assert [each["name"] for each in events_of(file.path, "X")] == ["step"]


def test_ops_are_named_by_what_tells_them_apart() -> None:
    plan = tiny_model("llama").plan()
    names = [op_name(plan, op) for op in plan.ops]
    assert names[0] == "embed token_embd"
    assert "attention 1" in names
    assert "linear blk.1.ffn_down" in names


SCRIPT = """
import sys, time
from pathlib import Path
from martlet.runtime.timeline import Timeline
from martlet.scripts.tracing import open_trace
with open_trace(Path(sys.argv[1])) as file:
    timeline = Timeline(file, "x")
    print("ready", flush=True)
    while True:
        with timeline.span("work"):
            pass
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL"])
def test_a_process_that_is_ended_leaves_whole_json(tmp_path: Path, number: str) -> None:
    path = tmp_path / "t.json"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while path.stat().st_size < 500_000:  # many writes have been there
        assert process.poll() is None
    process.send_signal(getattr(signal, number))
    process.wait(30)
    assert len(events_of(path, "X")) > 1000
