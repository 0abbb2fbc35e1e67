"""`martlet bench-steps`: what steps of a model cost here, for `martlet simulate`.

Owns: the command, and which steps are measured. What the figures mean is in sim_costs.py.
Whole steps of the engine count, with scheduling and drawing, and as many processes measure at once
as there will be replicas, since they share memory and cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import note

if TYPE_CHECKING:
    from martlet.runtime.engine import Engine
    from martlet.scripts.sim_costs import Costs, Table

STREAMS, DEEP_STREAMS = (1, 2, 4, 8, 16, 32), (1, 4, 16)
PROMPT_ROWS, DEEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 8, 64, 512)
TIMES, ENOUGH_S = 5, 1.0
DEPTH = 512


def bench_steps(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Option("-o", "--out", dir_okay=False, help="The costs, as JSON.")],
    replicas: Annotated[
        int, typer.Option(min=1, help="Processes that measure at once: as many as will serve.")
    ] = 1,
    depth: Annotated[int, typer.Option(min=1, help="Where it is measured a second time.")] = DEPTH,
    front_ms: Annotated[
        float, typer.Option(min=0, help="From a request's arrival to the engine's queue.")
    ] = 1.0,
    threads: options.ThreadsOption = None,
    context: options.ContextOption = None,
    kv_type: options.KvTypeOption = options.KvTypeName.f16,
) -> None:
    """Measure steps of MODEL on this machine, for `martlet simulate`."""
    if not out.absolute().parent.is_dir():
        raise MartletError(f"{out}: there is no folder {out.absolute().parent}")
    manner: dict[str, Any] = {"threads": threads, "context": context, "kv_type": kv_type.value}
    costs = measured_by(replicas, model, {**manner, "depth": depth, "front_s": front_ms / 1e3})
    out.write_text(costs.as_json(), encoding="utf-8")
    for name in ("alone", "prompt"):
        table: Table = getattr(costs, name)
        pairs = zip(table.rows, table.seconds, strict=True)
        note(f"{name}: " + ", ".join(f"{n} rows {seconds * 1e3:.3g} ms" for n, seconds in pairs))
    note(f"costs: {out}")


def measured_by(n_processes: int, model: str, options: dict[str, Any]) -> Costs:
    """The median of processes that measure side by side."""
    from martlet.scripts.sim_costs import costs_of, median_of

    words = [sys.executable, "-m", "martlet.scripts.bench_steps", model, json.dumps(options)]
    children = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(n_processes)
    ]
    printed = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise MartletError("a process that measured has failed; its words are above")
    costs = median_of([costs_of(text) for text in printed])
    costs.conditions["replicas"] = n_processes
    return costs


def measure(
    model: str,
    *,
    threads: int | None,
    context: int | None,
    kv_type: str,
    depth: int,
    front_s: float,
) -> Costs:
    from martlet.runtime.engine import Engine
    from martlet.scripts.conditions import file_conditions, machine_conditions
    from martlet.scripts.generate import open_model
    from martlet.scripts.sim_costs import Costs, Shape, Table

    with open_model(model, threads=threads, context=context, kv_type=kv_type) as opened:
        if not opened.config.generates:
            raise MartletError(f"{model} does not generate, and its steps are those of whole texts")
        executor = opened.executor
        # Whole steps of a prompt come before the one that is measured.
        depth = max(depth // executor.max_rows, 1) * executor.max_rows
        if opened.context < depth + 2 * TIMES:
            raise MartletError(
                f"a context of {opened.context} tokens is too short to measure at {depth}; say "
                f"--context {depth + 2 * TIMES}, or more"
            )
        fields = ("block_tokens", "n_blocks", "max_rows", "n_window_blocks", "window", "n_states")
        shape = Shape(
            **{name: getattr(executor, name) for name in fields},
            n_guesses=executor.n_guesses,
            sees_ahead=executor.sees_ahead,
            vocab_size=opened.tokenizer.vocab_size,
            context=opened.context,
        )
        engine = Engine(executor, opened.tokenizer, context=opened.context, prefix_reuse=False)
        room = shape.n_blocks * shape.block_tokens

        def alone(ns: Sequence[int], before: int) -> Table:
            fits = [n for n in ns if n * (before + 64) <= room]
            return Table(tuple(fits), tuple(streams_s(engine, n, before) for n in fits))

        def prompt(ns: Sequence[int], before: int) -> Table:
            fits = [n for n in ns if n <= shape.max_rows and before + n < opened.context]
            return Table(tuple(fits), tuple(prompt_s(engine, n, before) for n in fits))

        try:
            streams_s(engine, 1, 0)  # what is touched for the first time
            streams, prompts = alone(STREAMS, 0), prompt(PROMPT_ROWS, 0)
            streams_growth = growth(streams, alone(DEEP_STREAMS, depth), depth)
            prompts_growth = growth(prompts, prompt(DEEP_ROWS, depth), depth)
        finally:
            engine.close()
        about = machine_conditions() | file_conditions(Path(opened.file.path))
        about |= {"threads": getattr(executor, "n_threads", None), "kv_type": kv_type}
        return Costs(shape, streams, streams_growth, prompts, prompts_growth, front_s, about)


def growth(shallow: Table, deep: Table, depth: int) -> Table:
    """What each of `depth` tokens before a row adds to it."""
    more = (
        max(0.0, seconds - shallow.at(n)) / (depth * n)
        for n, seconds in zip(deep.rows, deep.seconds, strict=True)
    )
    return replace(deep, seconds=tuple(more))


def streams_s(engine: Engine, n: int, before: int) -> float:
    """Of a step in which n streams get a token, so many tokens into their contexts."""
    requests = [_submit(engine, before + 1, TIMES + 2) for _ in range(n)]
    while not all(request.is_streaming for request in requests):
        engine.step()
    taken = _time_of(engine, TIMES)
    while engine.step():
        pass
    return taken


def prompt_s(engine: Engine, n: int, before: int) -> float:
    """Of a step that ends a prompt with n rows, behind so many others."""
    taken: list[float] = []
    while len(taken) < TIMES and (sum(taken) < ENOUGH_S or not taken):
        request = _submit(engine, before + n, 1)
        while request.n_computed < before:
            engine.step()
        taken.append(_time_of(engine, 1))
    return statistics.median(taken)


def _time_of(engine: Engine, n_steps: int) -> float:
    taken = []
    for _ in range(n_steps):
        start = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _submit(engine: Engine, n_prompt: int, n_output: int) -> Any:
    from martlet.runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=n_output, ignore_eos=True)
    ids = [token % engine._tokenizer.vocab_size for token in range(1, n_prompt + 1)]
    return engine.submit(ids, params, lambda event: None)


def main() -> None:
    """One of the processes that measure at once."""
    model, given = sys.argv[1:]
    print(measure(model, **json.loads(given)).as_json())


if __name__ == "__main__":
    main()
