"""What one model does, as events of a trace: steps, ops, and requests in their phases.

Owns: names and tracks of the events. Must not know: the file (trace_file.py), what an engine
decides, how an executor computes.

Its tracks are `engine`, with the steps and what lies between them; one per thread, with the ops it
worked on, whose gaps are waiting; and its requests. Only the native executor tells of its ops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from .events import FinishEvent
from .executors import Executor
from .latency import NS_PER_MS
from .ops import OPS
from .plan import Op, Plan
from .step import Step
from .trace_file import NS_PER_US, TraceFile, event

ENGINE = 0  # the track's number; those of threads follow


class Timeline:
    """A model as a process of a trace."""

    def __init__(self, file: TraceFile, name: str) -> None:
        self._file = file
        self.pid = file.new_process()
        file.add([self.named("process_name", ENGINE, name)])
        file.add([self.named("thread_name", ENGINE, "engine")])

    def named(self, what: str, track: int, name: str) -> str:
        return event(ph="M", pid=self.pid, tid=track, name=what, args={"name": name})

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """What the block takes, on the engine's track."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._add_span(name, start_ns, time.monotonic_ns(), args)

    def _add_span(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        ts, dur = self._file.us(start_ns), (end_ns - start_ns) / NS_PER_US
        fields = {"ph": "X", "pid": self.pid, "tid": ENGINE, "ts": ts, "dur": dur, "name": name}
        self._file.add([event(**fields, args=args)])

    def request(self, request_id: str, arrived_ns: int, end: FinishEvent) -> None:
        """A finished request: its phases beneath it, side by side with those of others."""
        timings = end.timings
        told = {
            "reason": end.reason,
            "prompt_tokens": end.n_prompt,
            "cached_tokens": end.n_cached,
            "output_tokens": end.n_output,
            "preempted": end.trace.n_preempted,
        }
        same = {"pid": self.pid, "tid": ENGINE, "cat": "request", "id": request_id}
        at, lines = self._file.us(arrived_ns), list[str]()

        def mark(phase: str, name: str, **args: Any) -> None:
            lines.append(event(ph=phase, ts=at, name=name, **same, **args))

        mark("b", "request", args=told)
        for name, ms in (
            ("queue", timings.queue_ms),
            ("prefill", timings.prefill_ms),
            ("decode", timings.decode_ms),
        ):
            mark("b", name)
            at += ms * NS_PER_MS / NS_PER_US
            mark("e", name)
        mark("e", "request")
        self._file.add(lines)

    def traced(self, executor: Executor, plan: Plan) -> Executor:
        """The executor, whose steps and ops are written down from now on."""
        return cast(Executor, _TracedExecutor(executor, plan, self))

    def step(self, step: Step, start_ns: int, end_ns: int) -> None:
        counts = {"rows": step.n_rows, "sequences": step.n_seqs, "logits": step.n_out}
        self._add_span("step", start_ns, end_ns, counts)

    def ops(self, heads: list[list[str]], spans: np.ndarray) -> None:
        """heads: per thread and op, the event up to its times; spans: as trace_ops gives them."""
        starts = (spans[..., 0] - self._file.start_ns) / NS_PER_US
        lasts = (spans[..., 1] - spans[..., 0]) / NS_PER_US
        lines = [
            f'{head},"ts":{start:.3f},"dur":{last:.3f}}}'
            for of_thread, *times in zip(heads, starts.tolist(), lasts.tolist(), strict=True)
            for head, start, last in zip(of_thread, *times, strict=True)
            if last > 0
        ]
        self._file.add(lines)

    def op_heads(self, plan: Plan, n_threads: int) -> list[list[str]]:
        for thread in range(n_threads):
            self._file.add([self.named("thread_name", 1 + thread, f"thread {thread}")])
        names = [op_name(plan, op) for op in plan.ops]
        return [
            [
                event(ph="X", pid=self.pid, tid=1 + thread, cat="op", name=name)[:-1]
                for name in names
            ]
            for thread in range(n_threads)
        ]


class _TracedExecutor:
    """All else is the executor's own."""

    def __init__(self, executor: Executor, plan: Plan, timeline: Timeline) -> None:
        self._executor, self._timeline = executor, timeline
        trace_ops = getattr(executor, "trace_ops", None)
        self._spans: np.ndarray | None = trace_ops() if trace_ops else None
        n_threads = 0 if self._spans is None else len(self._spans)
        self._heads = timeline.op_heads(plan, n_threads)

    def run(self, step: Step) -> np.ndarray:
        start_ns = time.monotonic_ns()
        logits = self._executor.run(step)
        self._timeline.step(step, start_ns, time.monotonic_ns())
        if self._spans is not None:
            self._timeline.ops(self._heads, self._spans)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def op_name(plan: Plan, op: Op) -> str:
    """As `linear blk.3.ffn_down`: the kind, and what tells the op from others of it."""
    kind = op.kind.name.lower()
    weights = [plan.tensors[w].name.removesuffix(".weight") for w in op.weights if w >= 0]
    if weights:
        return f"{kind} {weights[0]}"
    if "kv_layer" in OPS[op.kind].ints:
        return f"{kind} {op.int_of('kv_layer')}"
    return f"{kind} {plan.buffers[op.out].name}"
