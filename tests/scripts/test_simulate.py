"""Replicas on paper do what engines do, in the time that the costs say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime.engine import Engine
from martlet.runtime.events import FinishEvent
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.step import Step
from martlet.scripts.load_workload import Lengths, Load, Shape
from martlet.scripts.sim_cluster import Cluster, cached_share
from martlet.scripts.sim_costs import Costs, Table
from martlet.scripts.sim_costs import Shape as ModelShape
from martlet.scripts.sim_replica import Asked, Replica
from martlet.scripts.sim_routing import ROUTES
from martlet.scripts.sim_workload import Users

from ..runtime.scripted import VOCAB_SIZE, ScriptedExecutor, ScriptedTokenizer

STEP_S, ROW_S, GROWTH_S = 1e-2, 1e-3, 1e-6
ANSWER = 5
SHAPE = ModelShape(block_tokens=16, n_blocks=256, max_rows=64, vocab_size=VOCAB_SIZE, context=1024)


def flat(n: float) -> Table:
    return Table((1,), (n,))


LINE = Table((1, 2), (STEP_S + ROW_S, STEP_S + 2 * ROW_S))
COSTS = Costs(SHAPE, LINE, flat(GROWTH_S), LINE, flat(GROWTH_S))


def asked_of(n_prompt: int, n_output: int, at_s: float = 0.0, seed: int = 0) -> Asked:
    ids = np.random.default_rng(seed).integers(VOCAB_SIZE - 4, size=n_prompt + n_output)
    return Asked(ids.astype(np.int32), n_prompt, at_s)


def cluster_of(n: int = 1, route: str = "turn", costs: Costs = COSTS) -> Cluster:
    return Cluster(costs, n, ROUTES[route]())


def users(load: Load, n: int = 60, seed: int = 0, **shape: Any) -> Users:
    lengths = {"prompt": Lengths.parse("5-90"), "output": Lengths.parse("1-40"), **shape}
    return Users(Shape(**lengths), load, n, VOCAB_SIZE, seed)


# -- against the engine -------------------------------------------------------------------------


class PaperTime:
    """The engine's clock, which the executor's steps move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def step(self, step: Step) -> None:
        firsts = step.seq_start[:-1]
        lengths = np.diff(step.seq_start)
        before = int((step.positions[firsts] * lengths).sum())
        self.now_s += STEP_S + ROW_S * step.n_rows + GROWTH_S * before


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_an_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    asked = [
        asked_of(int(draw.integers(1, 200)), int(draw.integers(1, 30)), seed=seed * 100 + n // 2)
        for n in range(40)
    ]
    for each in asked:
        each.tokens[each.n_prompt :] = ANSWER
    clock = PaperTime()
    for name in ("engine", "drawing"):
        monkeypatch.setattr(f"martlet.runtime.{name}.time", clock)
    executor = ScriptedExecutor(lambda history: ANSWER, on_step=clock.step)
    engine = Engine(executor, ScriptedTokenizer(), context=SHAPE.context)
    ended: dict[int, FinishEvent] = {}
    for number, each in enumerate(asked):
        n_output = len(each.tokens) - each.n_prompt

        def on_event(event: Any, number: int = number) -> None:
            if isinstance(event, FinishEvent):
                ended[number] = event

        params = SamplingParams(max_tokens=n_output, ignore_eos=True)
        engine.submit(each.tokens[: each.n_prompt].tolist(), params, on_event)
    while engine.step():
        pass
    cluster = cluster_of()
    cluster.run(iter(asked))
    assert sum(len(step.tokens) for step in executor.steps) > 0
    assert cluster.replicas[0].n_steps == len(executor.steps)
    for number, each in enumerate(asked):
        timings = ended[number].timings
        assert each.n_cached == ended[number].n_cached
        assert each.end_s * 1e3 == pytest.approx(timings.end_to_end_ms)
        assert each.first_s * 1e3 == pytest.approx(timings.ttft_ms)


# -- stretches ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    n=st.integers(1, 3),
    load=st.sampled_from([Load(n_streams=3), Load(n_streams=9), Load(rate_per_s=3.0)]),
    turns=st.integers(1, 3),
    n_blocks=st.sampled_from([256, 24]),
)
def test_stretches_are_single_steps(
    seed: int, n: int, load: Load, turns: int, n_blocks: int
) -> None:
    costs = replace(COSTS, shape=replace(SHAPE, n_blocks=n_blocks, context=n_blocks * 16))
    found = []
    for is_single in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_single:
                patch.setattr(Replica, "_n_alike", lambda self: 1)
            cluster, asks = cluster_of(n, "least", costs), users(load, 40, seed, turns=turns)
            cluster.run(asks.arrivals(), asks.follow)
        for each in cluster.replicas:
            each.scheduler.check()
            assert each.scheduler.pool.n_held == 0
        assert len(cluster.seen) == 40
        rows = [(s.arrived_ns, s.n_prompt, s.n_cached, *s.piece_ns) for s in cluster.seen]
        found.append(sorted(rows))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_who_is_alone_waits_for_nobody() -> None:
    cluster = cluster_of()
    cluster.run(iter([asked_of(10, 5)]))
    (seen,) = cluster.seen
    assert seen.ttft_ms == pytest.approx(1e3 * (STEP_S + 10 * ROW_S))
    rest = sum(STEP_S + ROW_S + GROWTH_S * (10 + n) for n in range(4))
    assert seen.end_to_end_ms == pytest.approx(seen.ttft_ms + 1e3 * rest)


def test_who_arrives_meanwhile_waits_for_the_step_under_way() -> None:
    cluster = cluster_of()
    first, second = asked_of(10, 500), asked_of(8, 2, at_s=1.0, seed=1)
    cluster.run(iter([first, second]))
    step_s = STEP_S + ROW_S
    assert 0 < second.first_s - second.at_s < 2 * step_s + STEP_S + 9 * ROW_S + 1e-2


def test_what_comes_before_the_engine_counts() -> None:
    cluster = cluster_of(costs=replace(COSTS, front_s=0.5))
    cluster.run(iter([asked_of(10, 5)]))
    assert cluster.seen[0].ttft_ms == pytest.approx(500 + 1e3 * (STEP_S + 10 * ROW_S))


# -- users and routes ---------------------------------------------------------------------------


def test_users_ask_one_after_the_other() -> None:
    asks, cluster = users(Load(n_streams=4), 30), cluster_of(2)
    cluster.run(asks.arrivals(), asks.follow)
    assert len(cluster.seen) == 30
    starts, ends = ([getattr(s, name) for s in cluster.seen] for name in ("arrived_ns", "end_ns"))
    marks = sorted([(at, 1) for at in starts] + [(at, -1) for at in ends])
    n, most = 0, 0
    for _, change in marks:  # an end comes before what follows it
        n += change
        most = max(most, n)
    assert most == 4


def test_a_turn_knows_the_ones_before() -> None:
    asks, cluster = users(Load(n_streams=1), 3, turns=3), cluster_of()
    cluster.run(asks.arrivals(), asks.follow)
    lengths = [(s.n_prompt or 0, s.n_output, s.n_cached) for s in cluster.seen]
    for (prompt, output, _), (later, _, cached) in pairwise(lengths):
        assert later > prompt + output
        assert cached >= (prompt + output - 1) // 16 * 16


def shared(route: str) -> Cluster:
    """40 prefixes of ten blocks, of which a replica has room for a quarter."""
    costs = replace(COSTS, shape=replace(SHAPE, n_blocks=160))
    asks = users(
        *(Load(n_streams=8), 600),
        prompt=Lengths.parse("16"),
        output=Lengths.parse("8"),
        prefix=160,
        n_prefixes=40,
    )
    cluster = cluster_of(4, route, costs)
    cluster.run(asks.arrivals(), asks.follow)
    return cluster


def test_prefixes_are_worth_following() -> None:
    affine, random = shared("prefix"), shared("random")
    assert cached_share(affine.seen) >= 2 * cached_share(random.seen)
    assert affine.imbalance <= 1.3


@pytest.mark.parametrize("route", ROUTES)
def test_every_request_is_answered_once(route: str) -> None:
    cluster = shared(route)
    assert len(cluster.seen) == 600
    assert cluster.imbalance < 1.5
