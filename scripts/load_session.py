"""One session of a load: opens the sides, puts the same work to each in turns, makes records.
Owns the order of things and the progress shown; who is asked is in load_sides.py, what in
load_workload.py, and what comes of it in load_figures.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from martlet.quant.errors import MartletError
from martlet.scripts import load_sides
from martlet.scripts.conditions import machine_conditions
from martlet.scripts.console import byte_progress, note
from martlet.scripts.load_figures import figures_of, run_json
from martlet.scripts.load_run import Run, run_load
from martlet.scripts.load_sides import Manner, Side
from martlet.scripts.load_workload import Count, Load, Shape, make_workload
from martlet.scripts.models import find_model
from martlet.scripts.records import Record


@dataclass(frozen=True)
class Asked:
    """What a person wants to know."""

    targets: Sequence[str]
    direct: str | None
    commands: Sequence[tuple[str, str]]
    loads: Sequence[Load]
    shape: Shape
    requests: int | None
    cache: str
    warm_up: int | None
    repeat: int
    objectives: dict[str, float]
    timeout_s: float
    seed: int

    def n_requests(self, load: Load) -> int:
        if load.trace:
            return len(load.trace)
        return self.requests or 4 * (load.n_streams or 8) * self.shape.turns

    @property
    def most_streams(self) -> int:
        return max(load.n_streams or 16 for load in self.loads)

    def conditions(self, load: Load, manner: Manner) -> dict[str, Any]:
        return {
            **self.shape.conditions(),
            **(
                dict.fromkeys(("prompt_tokens", "output_tokens"), load.trace_name)
                if load.trace
                else {}
            ),
            "load": load.label,
            "requests": self.n_requests(load),
            "cache": self.cache,
            "repeats": self.repeat,
            "endpoint": manner.endpoint,
            "stream": manner.is_stream,
            "request_fields": json.dumps(dict(manner.extra), sort_keys=True),
            "seed": self.seed,
        }


def with_loop(work: Any) -> Any:
    """uvloop takes half the time per piece, where it is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def measure(asked: Asked, manner: Manner) -> list[Record]:
    """Every turn puts the same workload to every side; every other turn goes backwards."""
    machine, session = machine_conditions(), secrets.token_hex(4)
    records = []
    async with contextlib.AsyncExitStack() as stack:
        sides, count = await open_sides(stack, asked, manner)
        n_runs = len(asked.loads) * asked.repeat * len(sides)
        with progress(n_runs) as show:
            for load in asked.loads:
                runs: list[list[Run]] = [[] for _ in sides]
                n = asked.n_requests(load)
                n_warm = asked.warm_up if asked.warm_up is not None else load.n_streams or 1
                for side in sides:
                    warm = make_workload(
                        asked.shape, closed(load), n_warm, f"{asked.seed} {load.label} warm", count
                    )
                    show.begin(f"{side.label}: warm-up", len(warm))
                    await put(side, warm[:n_warm], closed(load), asked, show.step)
                for turn in range(asked.repeat):
                    work = make_workload(
                        asked.shape, load, n, f"{asked.seed} {load.label} {turn}", count
                    )
                    numbered = list(enumerate(sides))
                    for nth, side in numbered[::-1] if turn % 2 else numbered:
                        if asked.cache == "warm":
                            show.begin(f"{side.label}: filling its cache", n)
                            await put(side, work, closed(load), asked, show.step)
                        show.begin(f"{side.label}, {load.label}, {turn + 1}/{asked.repeat}", n)
                        runs[nth].append(await put(side, work, load, asked, show.step))
                        show.end()
                for side, of_side in zip(sides, runs, strict=True):
                    about = {**machine, **side.conditions, **asked.conditions(load, manner)}
                    details = {
                        "load": {"label": load.label, "amount": load.amount},
                        "objectives": asked.objectives,
                        "runs": [run_json(each) for each in of_side],
                    }
                    figures = figures_of(of_side, asked.objectives)
                    records.append(Record(side.label, about, figures, session, "", details))
    check_some_ended_well(records)
    return records


def check_some_ended_well(records: Sequence[Record]) -> None:
    for record in records:
        asked = [each for run in record.details["runs"] for each in run["requests"]]
        failed = [each["error"] for each in asked if each.get("error")]
        if len(failed) == len(asked):
            raise MartletError(f"{record.label}: no request ended well; the first: {failed[0]}")
        if failed:
            note(f"warning: {record.label}: {len(failed)} of {len(asked)} failed: {failed[0]}")


def closed(load: Load) -> Load:
    return Load(n_streams=load.n_streams or 1)


async def put(
    side: Side, work: Sequence[Any], load: Load, asked: Asked, step: Callable[[], None]
) -> Run:
    return await run_load(side.target, work, load.n_streams, timeout_s=asked.timeout_s, on_end=step)


async def open_sides(
    stack: contextlib.AsyncExitStack, asked: Asked, manner: Manner
) -> tuple[list[Side], Count | None]:
    """All sides, and what counts tokens where a model's file is at hand."""
    path = manner.file
    sides = []
    for target in asked.targets:
        if target.startswith(("http://", "https://")):
            label = target.partition("://")[2] if len(asked.targets) > 1 else None
            opened = load_sides.open_url(target, label, manner)
        else:
            path = found(target)
            opened = load_sides.open_served(target, path, manner)
        sides.append(await stack.enter_async_context(opened))
    if asked.direct:
        path = found(asked.direct)
        opened = load_sides.open_direct(asked.direct, path, manner)
        sides.append(await stack.enter_async_context(opened))
    for label, command in asked.commands:
        opened = load_sides.open_command(label, command, path, asked.most_streams, manner)
        sides.append(await stack.enter_async_context(opened))
    return sides, token_counter(path) if path else None


def found(model: str) -> Path:
    with byte_progress() as progress:
        return find_model(model, progress=progress)


def token_counter(path: Path) -> Count:
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime.tokenizer import Tokenizer

    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    return lambda text: len(tokenizer.encode(text, add_special=True, parse_special=True))


class Show:
    """One bar for the run and one for all runs; still while a run is measured but for its count."""

    def __init__(self, bar: Any, n_runs: int) -> None:
        self._bar = bar
        self._all = bar.add_task("runs", total=n_runs)
        self._now = bar.add_task("", total=1)

    def begin(self, what: str, n_requests: int) -> None:
        self._bar.reset(self._now, total=n_requests, description=what)
        self._bar.refresh()

    def step(self) -> None:
        self._bar.advance(self._now)

    def end(self) -> None:
        self._bar.advance(self._all)


@contextlib.contextmanager
def progress(n_runs: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # Twice a second: drawing takes milliseconds of the cores that serve.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        yield Show(bar, n_runs)
