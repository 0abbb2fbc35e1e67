"""`martlet simulate`: what replicas would do, by the real scheduler and measured costs.

Owns: the command: what its words mean, the table that it prints. The rest is in sim_*.py.
All figures are calculated, and say so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import print_json

if TYPE_CHECKING:
    from martlet.scripts.load_workload import Load, Shape
    from martlet.scripts.sim_cluster import Cluster
    from martlet.scripts.sim_costs import Costs

MOST_REPLICAS = 4096
COLUMNS = (
    ("replicas", "replicas", "d"),
    ("route", "route", "s"),
    ("out tok/s", "output_tokens_per_s", ".1f"),
    ("req/s", "requests_per_s", ".2f"),
    ("ttft p50", "ttft_ms.p50", ",.0f"),
    ("p95", "ttft_ms.p95", ",.0f"),
    ("tpot p50", "tpot_ms.p50", ",.1f"),
    ("p95", "tpot_ms.p95", ",.1f"),
    ("e2e p95", "end_to_end_ms.p95", ",.0f"),
    ("cached", "cached_share", ".1%"),
    ("busy", "busy_share", ".0%"),
    ("imbalance", "imbalance", ".2f"),
    ("good", "goodput.share", ".1%"),
)


def simulate(
    costs: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="What `bench-steps` has measured.")
    ],
    replicas: Annotated[str, typer.Option(help="How many, as 1,2,4.")] = "1",
    route: Annotated[
        str, typer.Option(help="turn, random, least (busy) or prefix; several as least,prefix.")
    ] = "least",
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: so many users at a time, as 8,64. Default: 8.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Open loop: requests per second.")] = None,
    burstiness: Annotated[float, typer.Option(min=0.01, help="1 is Poisson, below it bursts.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON lines: when, prompt, output tokens."),
    ] = None,
    requests: Annotated[int, typer.Option("-n", "--requests", min=1)] = 1000,
    prompt: Annotated[str, typer.Option(help="Tokens: 100, 50-200 or 100~30.")] = "100",
    output: Annotated[str, typer.Option(help="Tokens, likewise.")] = "64",
    prefix: Annotated[int, typer.Option(min=0, help="Shared tokens before each prompt.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="How many different ones.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = 1,
    think: Annotated[float, typer.Option(min=0, help="Mean seconds between answer and next.")] = 0,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="FIGURE:MS", help="ttft:1000, tpot:100 …")
    ] = None,
    find: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Least replicas with this share within --goodput."),
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of a replica's pool, if not as measured.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and tokens.")] = 0,
    as_json: options.JsonOption = False,
) -> None:
    """Calculate what replicas of a measured model would do under a load. See docs/simulation.md."""
    from dataclasses import replace

    from martlet.scripts.bench import whole_numbers
    from martlet.scripts.bench_serve import loads_of, objectives_of
    from martlet.scripts.load_workload import Lengths, Shape
    from martlet.scripts.sim_costs import costs_of
    from martlet.scripts.sim_routing import ROUTES

    measured = costs_of(costs.read_text(encoding="utf-8"), str(costs))
    if kv_blocks:
        measured = replace(measured, shape=replace(measured.shape, n_blocks=kv_blocks))
    names = route.split(",")
    if unknown := [name for name in names if name not in ROUTES]:
        raise typer.BadParameter(f"--route {unknown[0]!r} is none of {', '.join(ROUTES)}")
    if not (concurrency or rate or trace):
        concurrency = "8"
    loads = loads_of(concurrency, rate, burstiness, trace)
    shape = Shape(Lengths.parse(prompt), Lengths.parse(output), prefix, prefixes, turns)
    objectives = objectives_of(goodput or (), is_stream=True)
    if find and not objectives:
        raise typer.BadParameter("--find wants objectives: --goodput ttft:1000 …")
    rows: list[dict[str, Any]] = []
    for load in loads:
        for name in names:
            case = Case(measured, name, shape, load, requests, seed, think, objectives)
            if find:
                rows.append(case.least(find))
            else:
                rows += [case.run(n) for n in whole_numbers(replicas, "--replicas", 1)]
    if as_json:
        print_json({"grade": "calculated", "costs": measured.conditions, "cases": rows})
    else:
        print(as_text(rows, bool(objectives)))


class Case:
    """One load, one policy, any number of replicas."""

    def __init__(
        self,
        costs: Costs,
        route: str,
        shape: Shape,
        load: Load,
        n_requests: int,
        seed: int,
        think_s: float,
        objectives: dict[str, float],
    ) -> None:
        self.costs, self.route, self.objectives = costs, route, objectives
        self._asks = (shape, load, n_requests, costs.shape.vocab_size, seed, think_s)
        self.label = load.label

    def run(self, n_replicas: int) -> dict[str, Any]:
        from martlet.scripts.sim_cluster import Cluster
        from martlet.scripts.sim_routing import ROUTES
        from martlet.scripts.sim_workload import Users

        users, start_s = Users(*self._asks), time.perf_counter()
        cluster = Cluster(self.costs, n_replicas, ROUTES[self.route]())
        cluster.run(users.arrivals(), users.follow)
        about = {"load": self.label, "replicas": n_replicas, "route": self.route}
        return {**about, **self._figures(cluster), "took_s": time.perf_counter() - start_s}

    def least(self, share: float) -> dict[str, Any]:
        """The fewest replicas with which so large a share meets the objectives: doubled until it
        does, then halved. More replicas are taken to be no worse."""
        low, high = 0, 1
        while (found := self.run(high))["goodput.share"] < share:
            low, high = high, high * 2
            if high > MOST_REPLICAS:
                raise MartletError(
                    f"{low} replicas have {found['goodput.share']:.1%} within the objectives, not "
                    f"{share:.1%}: one replica alone may be too slow for them"
                )
        while high - low > 1:
            middle = (low + high) // 2
            case = self.run(middle)
            low, high, found = (
                (middle, high, found) if case["goodput.share"] < share else (low, middle, case)
            )
        return found

    def _figures(self, cluster: Cluster) -> dict[str, Any]:
        from martlet.runtime.aggregates import goodput, rates, samples, summary, window_s
        from martlet.scripts.sim_cluster import cached_share

        seen = cluster.seen
        found: dict[str, Any] = dict(rates(seen))
        for name in ("ttft_ms", "tpot_ms", "end_to_end_ms"):
            whole = summary(samples(name, seen))
            found |= {f"{name}.{mark}": whole[mark] for mark in ("mean", "p50", "p95", "p99")}
        found["cached_share"] = cached_share(seen)
        busy_s = sum(each.busy_s for each in cluster.replicas)
        found["busy_share"] = busy_s / (len(cluster.replicas) * window_s(seen))
        found["imbalance"] = cluster.imbalance
        found["steps"] = sum(each.n_steps for each in cluster.replicas)
        if self.objectives:
            found["goodput.share"] = goodput(seen, self.objectives)["share"]
        return found


def as_text(rows: list[dict[str, Any]], has_objectives: bool) -> str:
    columns = COLUMNS if has_objectives else COLUMNS[:-1]
    table = [["load", *(title for title, _, _ in columns)]]
    for row in rows:
        cells = ("-" if row[name] is None else format(row[name], form) for _, name, form in columns)
        table.append([row["load"], *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return "\n".join([*lines, "", "calculated; times in ms; definitions: docs/metrics.md"])


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["simulate", *sys.argv[1:]])
