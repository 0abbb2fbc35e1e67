"""From runs of a load to a record: figures per repeat, and every request.
Owns which figures there are and the form of a request in a file; what they mean is said in
runtime/latency.py and runtime/aggregates.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from martlet.runtime.aggregates import (
    NS_PER_S,
    PER_REQUEST,
    POOLED,
    goodput,
    rates,
    samples,
    summary,
    window_s,
)
from martlet.runtime.latency import NS_PER_MS
from martlet.scripts.load_run import Asked, Run
from martlet.scripts.records import Figure

MARKS = ("p50", "p95", "p99", "max")
KEPT_TIMINGS = ("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "end_to_end_ms")


def figures_of(runs: Sequence[Run], objectives: Mapping[str, float]) -> dict[str, Figure]:
    """One sample per run; what some run does not have is left out."""
    per_run = [_values(run, objectives) for run in runs]
    found = {}
    for name, (_, unit, is_higher_better) in per_run[0].items():
        values = [each[name][0] for each in per_run]
        known = tuple(float(value) for value in values if value is not None)
        if len(known) == len(runs):
            found[name] = Figure(known, unit, is_higher_better=is_higher_better)
    return found


Value = tuple[float | int | None, str, bool]


def _values(run: Run, objectives: Mapping[str, float]) -> dict[str, Value]:
    """{name: (value, unit, whether more is better)}"""
    seen = run.seen
    found: dict[str, Value] = {
        name: (value, "1/s" if name.startswith("requests") else "tokens/s", True)
        for name, value in rates(seen).items()
    }
    for name in (*PER_REQUEST, *POOLED):
        whole = summary(samples(name, seen))
        found |= {f"{name}.{mark}": (whole[mark], "ms", False) for mark in ("mean", *MARKS)}
    if objectives:
        good = goodput(seen, objectives)
        found["goodput.share"] = (good["share"], "", True)
        found["goodput.requests_per_s"] = (good["requests_per_s"], "1/s", True)
    well = [each for each in seen if each.outcome == "ok"]
    n_prompt = sum(each.n_prompt or 0 for each in well)
    n_output = sum(each.n_output for each in well)
    cached = sum(each.n_cached for each in well) / n_prompt if n_prompt else None
    found["cached_share"] = (cached, "", True)
    found["ended_badly"] = (len(seen) - len(well), "requests", False)
    found["client_late_ms.max"] = (max(each.late_ms for each in run.asked), "ms", False)
    per_token = 1e6 * run.client_cpu_s / n_output if n_output else None
    found["client_cpu_us_per_token"] = (per_token, "µs", False)
    found["window_s"] = (window_s(seen), "s", False)
    return found


def run_json(run: Run) -> dict[str, Any]:
    return {
        "requests": [request_json(each, run.start_ns) for each in run.asked],
        "kv": [[_s(at - run.start_ns), round(share, 4)] for at, share in run.kv],
        "client_cpu_s": round(run.client_cpu_s, 4),
    }


def request_json(each: Asked, start_ns: int) -> dict[str, Any]:
    """Seconds since the run's start; pieces in milliseconds since the request was due."""
    seen = each.seen
    found: dict[str, Any] = {
        "conversation": each.conversation,
        "turn": each.turn,
        "due_s": _s(seen.arrived_ns - start_ns),
        "sent_s": _s(each.sent_ns - start_ns),
        "end_s": _s(seen.end_ns - start_ns),
        "outcome": seen.outcome,
        "n_prompt": seen.n_prompt,
        "n_cached": seen.n_cached,
        "n_output": seen.n_output,
        "max_tokens": each.max_tokens,
        "finish_reason": each.reason,
        "pieces_ms": [round((at - seen.arrived_ns) / NS_PER_MS, 3) for at in seen.piece_ns],
    }
    if seen.piece_tokens != (1,) * len(seen.piece_ns):
        found["piece_tokens"] = seen.piece_tokens
    if each.error:
        found["error"] = each.error
    told = {name: each.server[name] for name in KEPT_TIMINGS if each.server.get(name) is not None}
    return {**found, "server": told} if told else found


def _s(ns: int) -> float:
    return round(ns / NS_PER_S, 6)
