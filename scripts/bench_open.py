"""Opens everything a benchmark needs: the model with a KV pool of the right size, and the limits.
Owns sizing and the facts about model and machine; must not know what is measured."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from martlet.quant.errors import MartletError
from martlet.runtime.executors.limits import MachineLimits
from martlet.runtime.machine import choose_threads, memory
from martlet.runtime.model import Model
from martlet.runtime.plan import Plan
from martlet.runtime.trace_file import TraceFile
from martlet.runtime.work import step_work
from martlet.scripts.bench_cases import Bench, Case, Room
from martlet.scripts.bench_measure import Limits
from martlet.scripts.console import byte_progress, note
from martlet.scripts.doctor import cpu_name, version
from martlet.scripts.generate import open_model
from martlet.scripts.models import find_model
from martlet.scripts.show_plan import plan_of_file

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Options:
    """What a person chose for martlet itself."""

    executor: str = "auto"
    threads: int | None = None
    isa: str | None = None
    step_rows: int = 256
    buffer_bytes: int | None = None  # of the read limit; None: as large as memory comfortably has
    repack: bool | None = None


@dataclass(frozen=True)
class Opened:
    model: Model
    bench: Bench
    limits: Limits
    facts: dict[str, Any]
    path: Path
    n_threads: int

    @property
    def plan(self) -> Plan:
        return self.model.plan


@contextlib.contextmanager
def open_bench(
    spec: str, cases: Sequence[Case], options: Options, trace: TraceFile | None = None
) -> Iterator[Opened]:
    with byte_progress() as progress:
        path = find_model(spec, progress=progress)
    room = Room.of(cases)
    load = {
        "executor": options.executor,
        "threads": options.threads,
        "isa": options.isa,
        "max_rows": options.step_rows,
        "block_tokens": BLOCK_TOKENS,
        "context": room.positions,
        "kv_bytes": pool_bytes(plan_of_file(path, options.step_rows), room),
        "trace": trace,
        "repack": options.repack,
        "gives_back": False,  # steps are laid out here, over whole contexts
        "guesses": 0,
    }
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(open_model(str(path), **load))
        bench = Bench(model.executor, room, model.config.vocab_size)
        n_threads = getattr(model.executor, "n_threads", choose_threads(options.threads).count)
        machine = open_limits(stack, n_threads, options)
        limits = Limits(machine, span_bytes=weight_bytes(model.plan, bench))
        about = facts(model, path, options, n_threads, limits)
        yield Opened(model, bench, limits, about, path, n_threads)


def pool_bytes(plan: Plan, room: Room) -> int:
    needed = room.n_seqs * room.blocks_per_seq(BLOCK_TOKENS) * BLOCK_TOKENS
    n_bytes = needed * plan.kv_bytes_per_token()
    available = memory().available_bytes
    if n_bytes > available // 2:
        raise MartletError(
            f"{room.n_seqs} sequences of {room.positions} tokens need {n_bytes >> 20} MiB of keys"
            f" and values, more than half of the {available >> 20} MiB available; ask for fewer"
            " with --batch or for less with --depth"
        )
    # States take up to half of the pool.
    return 2 * max(n_bytes, room.n_seqs * plan.state_bytes) if plan.states else n_bytes


def open_limits(
    stack: contextlib.ExitStack, n_threads: int, options: Options
) -> MachineLimits | None:
    """None, and a word on it, where the native library is missing."""
    try:
        machine = MachineLimits(
            n_threads=n_threads, isa=options.isa, buffer_bytes=options.buffer_bytes
        )
        return stack.enter_context(machine)
    except (OSError, MartletError) as error:
        note(f"the machine's limits cannot be measured: {error}")
        return None


def weight_bytes(plan: Plan, bench: Bench) -> int:
    first = next(bench.steps(Case("decode", 1)))
    return step_work(plan, first).weight_bytes


def facts(
    model: Model, path: Path, options: Options, n_threads: int, limits: Limits
) -> dict[str, Any]:
    """What a figure means nothing without."""
    return {
        "martlet": version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": model.config.name,
            "file": path.name,
            "file_bytes": model.file.n_bytes,
            "weight_bytes_per_step": limits.span_bytes,
        },
        "machine": {
            "cpu": cpu_name(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "executor": model.executor.name,
        "executor_reason": model.executor_reason,
        "isa": getattr(model.executor, "isa", None),
        "threads": n_threads,
        "threads_reason": choose_threads(options.threads).reason,
        "step_rows": model.executor.max_rows,
        "limit_buffer_bytes": limits.machine.buffer_bytes if limits.machine else None,
    }
