"""Holds `martlet simulate` against replicas that run: the same load over HTTP, in turn to each.

    python scripts/check_simulation.py MODEL [--replicas 1,2,4] [--streams 4] [-n 48] [--repeat 3]

As many processes as will serve measure steps first, a thread each; then as many `martlet serve` are
asked, by --streams users for each of them. The runs' medians stand beside what the same requests
take on paper. All share this machine's cores, the clients too. Knows no definitions of latency.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from martlet.runtime.aggregates import Seen, rates, samples, summary
from martlet.scripts.bench_steps import measured_by
from martlet.scripts.load_run import Run, run_load
from martlet.scripts.load_session import found, token_counter
from martlet.scripts.load_sides import Manner, open_served
from martlet.scripts.load_targets import Answer, Question, Target
from martlet.scripts.load_workload import Lengths, Load, Shape, make_workload
from martlet.scripts.sim_cluster import Cluster
from martlet.scripts.sim_costs import Costs
from martlet.scripts.sim_routing import ROUTES
from martlet.scripts.sim_workload import Users

SHAPE = Shape(Lengths.parse("50-200"), Lengths.parse("16-96"))
CONTEXT = 2048


@dataclass
class InTurn:
    """Each request to the next of several targets."""

    targets: Sequence[Target]
    n_asked: int = 0

    async def ask(self, question: Question) -> Answer:
        self.n_asked += 1
        return await self.targets[(self.n_asked - 1) % len(self.targets)].ask(question)

    async def kv_used(self) -> float | None:
        return None

    async def close(self) -> None:
        return None


def figures(seen: Sequence[Seen]) -> dict[str, float]:
    ttft = summary(samples("ttft_ms", seen))
    return {
        "output tokens/s": rates(seen)["output_tokens_per_s"] or 0.0,
        "ttft p50, ms": ttft["p50"] or 0.0,
        "ttft p95, ms": ttft["p95"] or 0.0,
    }


async def serve(model: str, n_replicas: int, load: Load, n: int, repeat: int) -> list[Run]:
    path, runs = found(model), []
    extra = {"ignore_eos": True}
    manner = Manner(*("completions", True, None, None, extra, 1, "f16", path, {}, "off", CONTEXT))
    async with contextlib.AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(open_served(model, path, manner))
            for _ in range(n_replicas)
        ]
        target, count = InTurn([side.target for side in sides]), token_counter(path)
        for nth in range(-1, repeat):
            work = make_workload(SHAPE, load, n, f"check {nth}", count)
            target.n_asked = 0
            run = await run_load(target, work, load.n_streams)
            if nth >= 0:  # the one before is a warm-up
                runs.append(run)
    return runs


def on_paper(costs: Costs, n_replicas: int, load: Load, run: Run) -> list[Seen]:
    """The very requests of a run."""
    asked = sorted(run.asked, key=lambda each: each.conversation)
    lengths = [(each.seen.n_prompt or 0, each.max_tokens) for each in asked]
    users = Users(SHAPE, load, len(lengths), costs.shape.vocab_size, lengths=lengths)
    cluster = Cluster(costs, n_replicas, ROUTES["turn"]())
    cluster.run(users.arrivals(), users.follow)
    return cluster.seen


def check(model: str, n_replicas: int, n_streams: int, n: int, repeat: int) -> None:
    manner = {"threads": 1, "context": CONTEXT, "kv_type": "f16", "depth": 512, "front_s": 1e-3}
    before = measured_by(n_replicas, model, manner)
    load = Load(n_streams=n_streams * n_replicas)
    runs = asyncio.run(serve(model, n_replicas, load, n * n_replicas, repeat))
    measured = [figures(run.seen) for run in runs]
    paper = [figures(on_paper(before, n_replicas, load, run)) for run in runs]
    print(f"{n_replicas} replicas, {load.label}, {n * n_replicas} requests, {repeat} runs")
    for name in measured[0]:
        there, here = (statistics.median(each[name] for each in of) for of in (measured, paper))
        spread = (max(m[name] for m in measured) - min(m[name] for m in measured)) / there
        print(
            f"  {name}: measured {there:,.1f} (spread {spread:.0%}), calculated {here:,.1f}: "
            f"{here / there - 1:+.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--streams", type=int, default=4, help="users per replica")
    parser.add_argument("-n", type=int, default=48, help="requests per replica")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    for n_replicas in map(int, args.replicas.split(",")):
        check(args.model, n_replicas, args.streams, args.n, args.repeat)


if __name__ == "__main__":
    main()
