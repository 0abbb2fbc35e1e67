"""`martlet soak`: thousands of random requests through one engine, and what is left afterwards.
Owns the visitors and the verdict: every request ended, no block is lost, memory stays flat."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import note
from martlet.scripts.options import parse_bytes

if TYPE_CHECKING:
    from martlet.runtime.engine import Engine
    from martlet.runtime.events import Event
    from martlet.runtime.model import Model
    from martlet.runtime.service import Service

REPORT_EVERY = 100
WARM_UP = 4  # the first quarter of the requests
N_PREFIXES = 8
MOST_ANSWERS = 4  # to one prompt
MOST_OUTPUT = 48
MOST_WAITING = 64
HOURS_KV_BYTES = 128 << 20
"""Of the server that is driven for hours: too little for all, so that it preempts and evicts."""


def soak(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|URL", help="As for `run`, or a running `serve`: http://…"),
    ],
    requests: Annotated[int, typer.Option("-n", "--requests", min=8)] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of shapes, tokens and cancellations.")] = 0,
    context: options.ContextOption = 1024,
    kv_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="SIZE", help="Default: four contexts."),
    ] = None,
    tolerance: Annotated[
        int,
        typer.Option(
            parser=parse_bytes, metavar="SIZE", help="Resident memory may grow by it after warm-up."
        ),
    ] = "16M",  # type: ignore[assignment]
    clients: Annotated[int, typer.Option(min=1, help="At a time, of a URL and with --hours.")] = 64,
    health_ms: Annotated[
        float, typer.Option(min=0, help="p99 of /health meanwhile may be that, of a URL.")
    ] = 200.0,
    hours: Annotated[
        float | None,
        typer.Option(min=0.001, help="Instead: a server with all there is, for so long."),
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="MODEL", help="With --hours: a model that comes and goes."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(dir_okay=False, help="With --hours: what was found, as JSON.")
    ] = None,
    executor: options.ExecutorOption = options.ExecutorName.auto,
    threads: options.ThreadsOption = None,
    kv_type: options.KvTypeOption = options.KvTypeName.f16,
) -> None:
    """Serve random REQUESTS, with cancellations and shared prefixes, and check what is left."""
    if hours is not None:
        sizes = ["--context", str(context), "--kv-bytes", str(kv_bytes or HOURS_KV_BYTES)]
        more = ["--executor", executor.value, "--kv-type", kv_type.value]
        more += ["--threads", str(threads)] if threads else []
        soak_for([model, *(others or [])], hours, clients, seed, [*sizes, *more], record)
        return
    if others or record:
        raise MartletError("--with and --record belong to --hours")
    if model.startswith("http://"):
        from martlet.scripts.soak_http import HttpSoak

        visits = HttpSoak(model.removeprefix("http://").rstrip("/"), clients, seed)
        visits.serve(requests)
        conclude(requests, visits.summary(), visits.faults(tolerance, health_ms))
        return

    from martlet.runtime.engine import Engine
    from martlet.scripts.generate import open_model

    load = {"executor": executor.value, "threads": threads, "kv_type": kv_type.value}
    with open_model(model, context=context, kv_bytes=kv_bytes, **load) as opened:
        touch_pool(opened)
        engine = Engine(
            opened.executor, opened.tokenizer, context=opened.context, max_queue=MOST_WAITING
        )
        run = Soak(engine, opened.tokenizer.vocab_size, Random(seed))
        try:
            run.serve(requests)
        finally:
            engine.close()
    conclude(requests, run.summary(), run.faults(tolerance))


def soak_for(
    models: list[str],
    hours: float,
    clients: int,
    seed: int,
    serve_options: list[str],
    record: Path | None,
) -> None:
    from martlet.scripts.conditions import machine_conditions, martlet_versions
    from martlet.scripts.soak_hours import Load, LongSoak

    conditions = {**martlet_versions(), **machine_conditions()}
    run = LongSoak(Load(models, serve_options), hours * 3600, clients, seed)
    run.run()
    summary = run.summary()
    if record:
        facts = {"conditions": conditions, "models": models, "options": serve_options}
        record.write_text(json.dumps({**facts, **summary}, indent=1) + "\n")
    for fault, n in run.faults.most_common():
        note(f"FAILED: {n} times {fault}")
    print(
        f"{summary['right']} answers as alone, {summary['left_within_the_answer']} left, "
        f"{hours:g} h, {clients} clients; memory at most {summary['peak_bytes'] / 1e6:.0f} MB; "
        f"{'failed' if run.faults else 'all well'}"
    )
    if run.faults:
        raise typer.Exit(1)


def conclude(n_requests: int, summary: str, faults: list[str]) -> None:
    for fault in faults:
        note(f"FAILED: {fault}")
    print(f"{n_requests} requests: {summary}; {'failed' if faults else 'all well'}")
    if faults:
        raise typer.Exit(1)


def touch_pool(model: Model) -> None:
    """The system gives memory when it is first written; that must not look like growth."""
    executor = model.executor
    for block in range(1, executor.n_blocks):
        executor.copy_block(0, block, (0, block % executor.n_window_blocks))


class Visit(NamedTuple):
    prompt: list[int]
    max_tokens: int
    service: Service
    salt: bytes
    deadline_ms: float | None


@dataclass
class Soak:
    """Visits to an engine that is stepped by hand; but for deadlines, a seed gives all again."""

    engine: Engine
    vocab_size: int
    draw: Random
    resident: Callable[[], int] | None = None
    """Bytes of memory this process holds; by default as the system tells."""
    reasons: Counter[str] = field(default_factory=Counter)
    n_ends: Counter[str] = field(default_factory=Counter)
    """Ends told per request: one each, if all is well."""
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Resident bytes: after warm-up, then every REPORT_EVERY requests and at the end."""

    def serve(self, n_requests: int) -> None:
        start, warm_up = time.monotonic(), n_requests // WARM_UP
        visits = self._visits()
        for _ in range(n_requests):
            self._submit(next(visits))
            while self.engine.stats().waiting >= MOST_WAITING // 2:
                self.engine.step()
            for _ in range(self.draw.randrange(6)):
                self.engine.step()
            if len(self.names) == warm_up:
                self._finish_all()
                self.sizes.append(self._resident())
            if len(self.names) % REPORT_EVERY == 0:
                self._report(time.monotonic() - start)
        self._finish_all()
        self.sizes.append(self._resident())

    def faults(self, tolerance_bytes: int) -> list[str]:
        """What is wrong, each in a line; nothing if all is well."""
        found, stats = [], self.engine.stats()
        wrong = [name for name in self.names if self.n_ends[name] != 1]
        if wrong:
            found.append(f"{len(wrong)} requests did not end just once, as {wrong[0]}")
        if self.reasons["error"]:
            found.append(f"{self.reasons['error']} requests ended with an error")
        if stats.running or stats.waiting or stats.blocks_used or stats.window_blocks_used:
            found.append(
                f"{stats.running} running, {stats.waiting} waiting, {stats.blocks_used} blocks and "
                f"{stats.window_blocks_used} window blocks held by nobody"
            )
        try:
            self.engine.scheduler.pool.check([])
        except AssertionError as error:
            found.append(f"the pool is inconsistent: {error}")
        grown = max(self.sizes) - self.sizes[0]
        if grown > tolerance_bytes:
            found.append(
                f"memory grew by {grown / 1e6:.1f} MB after warm-up, allowed are "
                f"{tolerance_bytes / 1e6:.1f}"
            )
        return found

    def summary(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.reasons.most_common())
        grown = max(self.sizes) - self.sizes[0]
        return f"{reasons}; memory grew by {grown / 1e6:.1f} MB after warm-up"

    def _visits(self) -> Iterator[Visit]:
        """Prompts that begin alike, some of them asked for several answers at a time."""
        draw, longest = self.draw, self.engine.context - MOST_OUTPUT - 1
        prefixes = [self._tokens(draw.randrange(longest)) for _ in range(N_PREFIXES)]
        while True:
            common = draw.choice(prefixes)
            common = common[: draw.randrange(len(common) + 1)]
            own = self._tokens(draw.randrange(1, max(2, longest - len(common) + 1)))
            own = own[: draw.choice((1, 3, 20, len(own)))]
            visit = Visit(
                prompt=common + own,
                max_tokens=draw.randrange(1, MOST_OUTPUT),
                service=draw.choice(("interactive", "interactive", "background")),
                salt=draw.choice((b"", b"", b"other")),
                deadline_ms=draw.choice((None, None, None, 500.0)),
            )
            for _ in range(draw.choice((1, 1, 1, MOST_ANSWERS))):
                yield visit

    def _tokens(self, n: int) -> list[int]:
        return [self.draw.randrange(self.vocab_size) for _ in range(n)]

    def _submit(self, visit: Visit) -> None:
        from martlet.runtime.sampling_params import SamplingParams

        name = f"soak-{len(self.names)}"
        self.names.append(name)

        def on_event(event: Event) -> None:
            reason = getattr(event, "reason", None)
            if reason:
                self.n_ends[name] += 1
                self.reasons[reason] += 1

        params = SamplingParams(
            temperature=0.8, seed=len(self.names), max_tokens=visit.max_tokens, ignore_eos=True
        )
        self.engine.submit(
            visit.prompt,
            params,
            on_event,
            request_id=name,
            service=visit.service,
            cache_salt=visit.salt,
            deadline_ms=visit.deadline_ms,
        )
        if self.draw.random() < 0.3:
            self.engine.cancel(self.draw.choice(self.names[-8:]))

    def _finish_all(self) -> None:
        while self.engine.step():
            pass

    def _resident(self) -> int:
        if self.resident:
            return self.resident()
        from martlet.runtime.machine import resident_bytes

        return resident_bytes()

    def _report(self, seconds: float) -> None:
        n_bytes, stats = self._resident(), self.engine.stats()
        if self.sizes:
            self.sizes.append(n_bytes)
        note(
            f"{len(self.names):>6} requests  {n_bytes / 1e6:>8.1f} MB resident  "
            f"{stats.steps} steps, {stats.preemptions} preemptions, {stats.tokens_cached} tokens "
            f"cached, {seconds:.0f} s"
        )


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["soak", *sys.argv[1:]])
