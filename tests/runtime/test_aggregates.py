"""Each figure of many requests says exactly what its definition does, the odd cases included."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.aggregates import (
    PER_REQUEST,
    POOLED,
    Seen,
    goodput,
    meets,
    percentile,
    rates,
    samples,
    summary,
    window_s,
)
from martlet.runtime.latency import DEFINITIONS, rate_per_s, token_gaps_ms

MS = 1_000_000
DOC = Path(__file__).parents[2] / "docs/metrics.md"
VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def seen(
    arrived_ms: int,
    pieces_ms: tuple[int, ...],
    tokens: tuple[int, ...] | None,
    n_output: int | None = None,
    **others: object,
) -> Seen:
    """Streamed and ended well, unless told otherwise."""
    fields: dict[str, object] = {
        "arrived_ns": arrived_ms * MS,
        "end_ns": (pieces_ms[-1] if pieces_ms else arrived_ms) * MS,
        "outcome": "ok",
        "n_output": sum(tokens or ()) if n_output is None else n_output,
        "n_prompt": 10,
        "piece_ns": tuple(at * MS for at in pieces_ms),
        "piece_tokens": tokens,
    }
    return Seen(**{**fields, **others})  # type: ignore[arg-type]


PLAIN = seen(100, (200, 250, 300), (1, 1, 1))
ONE_TOKEN = seen(0, (70,), (1,))
SPECULATED = seen(0, (100, 200), (1, 3))
WHOLE = seen(0, (), None, n_output=4, end_ns=400 * MS)
CANCELLED = seen(0, (50, 60), (1, 1), outcome="cancelled", end_ns=900 * MS)


def test_times_of_a_plain_stream() -> None:
    assert (PLAIN.ttft_ms, PLAIN.tpot_ms, PLAIN.end_to_end_ms) == (100, 50, 200)
    assert PLAIN.amortised_tpot_ms == pytest.approx(200 / 3)
    assert PLAIN.token_gaps_ms == PLAIN.step_gaps_ms == [50, 50]


def test_one_token_has_a_first_and_no_time_per_token() -> None:
    assert (ONE_TOKEN.ttft_ms, ONE_TOKEN.tpot_ms) == (70, None)
    assert ONE_TOKEN.amortised_tpot_ms == 70
    assert ONE_TOKEN.step_gaps_ms == ONE_TOKEN.token_gaps_ms == []


def test_tokens_of_one_step_come_together() -> None:
    assert SPECULATED.tpot_ms == pytest.approx(100 / 3)
    assert SPECULATED.step_gaps_ms == [100]
    assert SPECULATED.token_gaps_ms == [100, 0, 0]


def test_pieces_of_unknown_size_have_no_token_gaps() -> None:
    unknown = seen(0, (100, 200), None, n_output=4)
    assert unknown.token_gaps_ms == []
    assert (unknown.step_gaps_ms, unknown.tpot_ms) == ([100], pytest.approx(100 / 3))


def test_without_a_stream_only_the_end_is_seen() -> None:
    assert (WHOLE.ttft_ms, WHOLE.tpot_ms, WHOLE.end_to_end_ms) == (None, None, 400)
    assert WHOLE.amortised_tpot_ms == 100


def test_what_did_not_end_well_gives_no_samples_and_takes_its_time() -> None:
    both = [PLAIN, CANCELLED]
    assert samples("ttft_ms", both) == [100]
    assert samples("itl_ms", both) == [50, 50]
    assert window_s(both) == 0.9
    found = rates(both)
    assert found["output_tokens_per_s"] == pytest.approx(3 / 0.9)
    assert found["input_tokens_per_s"] == pytest.approx(10 / 0.9)
    assert found["requests_per_s"] == pytest.approx(1 / 0.9)


def test_cached_prompt_tokens_are_input_and_not_computed() -> None:
    found = rates([seen(0, (500,), (1,), n_cached=8)])
    assert found["input_tokens_per_s"] == 20
    assert found["computed_input_tokens_per_s"] == 4


def test_an_unknown_prompt_makes_input_rates_unknown() -> None:
    found = rates([PLAIN, seen(0, (500,), (1,), n_prompt=None)])
    assert found["input_tokens_per_s"] is None
    assert found["output_tokens_per_s"] == 8


def test_throughput_is_a_ratio_of_sums() -> None:
    """Two requests at 10 and 1 tokens per second make 11 tokens in one second."""
    found = rates([seen(0, (1000,), (10,)), seen(0, (1000,), (1,))])
    assert found["output_tokens_per_s"] == 11


def test_nothing_gives_no_figures() -> None:
    assert summary([]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max")) | {"n": 0}
    assert set(rates([]).values()) == {None}
    assert goodput([], {}) == {"n_good": 0, "share": None, "requests_per_s": None}
    assert rate_per_s(0, 10) is None
    assert rate_per_s(3, 0) is None


@pytest.mark.parametrize(
    ("request_", "objectives", "expected"),
    [
        (PLAIN, {"ttft_ms": 100, "tpot_ms": 50, "end_to_end_ms": 200}, True),
        (PLAIN, {"ttft_ms": 99.9}, False),
        (PLAIN, {"tpot_ms": 49.9}, False),
        (ONE_TOKEN, {"tpot_ms": 0.1, "itl_ms": 0.1, "step_gap_ms": 0.1}, True),
        (SPECULATED, {"itl_ms": 99}, False),
        (WHOLE, {"end_to_end_ms": 400}, True),
        (WHOLE, {"ttft_ms": 1e9}, False),
        (WHOLE, {"tpot_ms": 1e9}, False),
        (WHOLE, {"step_gap_ms": 1e9}, False),
        (CANCELLED, {}, False),
        (PLAIN, {}, True),
    ],
)
def test_who_meets_what(request_: Seen, objectives: dict[str, float], expected: bool) -> None:
    assert meets(request_, objectives) is expected


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(VALUES, st.lists(st.floats(0, 100), min_size=2, max_size=2).map(sorted))
def test_percentiles_rise_between_the_ends(values: list[float], percents: list[float]) -> None:
    low, high = (percentile(values, percent) for percent in percents)
    assert low is not None
    assert high is not None
    slack = 1e-9 * max(values)
    assert min(values) - slack <= low <= high + slack
    assert high <= max(values) + slack
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


STEPS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 5)), min_size=1, max_size=20)


@given(STEPS)
def test_token_gaps_fill_the_decode(steps: list[tuple[int, int]]) -> None:
    at = tuple(np.cumsum([ns for ns, _ in steps]).tolist())
    tokens = tuple(n for _, n in steps)
    gaps = token_gaps_ms(at, tokens)
    assert len(gaps) == sum(tokens) - 1
    assert math.fsum(gaps) == pytest.approx((at[-1] - at[0]) / MS)
    request = Seen(0, at[-1], "ok", sum(tokens), piece_ns=at, piece_tokens=tokens)
    if gaps:
        assert math.fsum(gaps) / len(gaps) == pytest.approx(request.tpot_ms)


REQUESTS = st.lists(
    st.builds(
        lambda arrived, first, gap, n, outcome: seen(
            arrived, tuple(arrived + first + gap * i for i in range(n)), (1,) * n, outcome=outcome
        ),
        *(st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 100), st.integers(1, 9)),
        st.sampled_from(["ok", "cancelled", "error"]),
    ),
    min_size=1,
    max_size=12,
)
LIMITS = st.dictionaries(st.sampled_from(PER_REQUEST), st.floats(1, 3000), max_size=3)


@given(REQUESTS, LIMITS, st.sampled_from(PER_REQUEST), st.floats(1, 3000))
def test_goodput_counts_and_falls_with_every_objective(
    requests: list[Seen], objectives: dict[str, float], name: str, most: float
) -> None:
    found = goodput(requests, objectives)
    assert found["n_good"] == sum(meets(each, objectives) for each in requests)
    assert found["share"] == found["n_good"] / len(requests)
    assert found["requests_per_s"] == pytest.approx(found["n_good"] / window_s(requests))
    stricter = {**objectives, name: min(most, objectives.get(name, math.inf))}
    assert goodput(requests, stricter)["n_good"] <= found["n_good"]
    assert goodput(requests, {})["n_good"] == sum(each.outcome == "ok" for each in requests)
    assert goodput(requests, {})["requests_per_s"] == pytest.approx(
        rates(requests)["requests_per_s"]
    )


def test_the_page_tells_every_definition() -> None:
    told = DOC.read_text(encoding="utf-8")
    for name, each in DEFINITIONS.items():
        row = f"| `{name}` | {each.start} | {each.end} | {each.over} | {each.odd} |"
        assert row in told, name
    assert set(DEFINITIONS) >= {*PER_REQUEST, *POOLED}
