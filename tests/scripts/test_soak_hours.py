"""`martlet soak MODEL --hours N`: everything at once, and each thing it watches for fails it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from martlet.scripts.soak_hours import Begun, Load, LongSoak, Look, Refusal, counter
from martlet.scripts.soak_questions import KINDS, Question, Streamed, what_counts

from .conftest import Martlet

TEXT = Question("text", "/v1/completions", {"model": "m", "stream": True})
ALONE = {"text": "one two", "reason": "stop", "n_output": 2}


def test_a_short_one_is_well(martlet: Martlet, tiny_file: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    sizes = ("--context", "1152", "--kv-bytes", "400K", "--clients", "6")
    done = martlet("soak", str(tiny_file), "--hours", "0.006", *sizes, "--record", str(record))
    found = json.loads(record.read_text())
    # On a busy machine the few looks of 20 s need not show the peak within the warm-up.
    faults = [fault for fault in found["faults"] if "after the warm-up" not in fault]
    assert not faults, done.stderr
    assert found["right"] > 0
    assert found["conditions"]["cores"] > 0
    assert (done.returncode == 0) == (not found["faults"])


def soak() -> LongSoak:
    run = LongSoak(Load(["m"], []), seconds=40, n_clients=1, seed=0)
    run.names = ["m"]
    return run


def test_answers_are_held_against_those_alone() -> None:
    run = soak()
    run._judge(TEXT, ALONE, ALONE)
    run._judge(TEXT, ALONE, Begun("one t"))
    assert (run.answered["text"], run.requested["m"], run.left["m"]) == (1, 1, 1)
    assert not run.faults
    run._judge(TEXT, ALONE, {**ALONE, "text": "one too"})
    run._judge(TEXT, ALONE, Begun("two"))
    run._judge(TEXT, ALONE, Refusal(503, "full"))
    assert sorted(run.faults) == [
        "text: another answer than alone",
        "text: begins otherwise than alone",
        "text: status 503: full",
    ]


@pytest.mark.parametrize(
    ("late", "told"),
    [
        ([Look(39, 102, 7, 5)], None),
        ([Look(31, 190, 7, 5), Look(39, 102, 5, 5)], None),  # a peak: others were loaded
        ([Look(39, 103, 5, 5)], "least resident_bytes grew"),
        ([Look(31, 104, 5, 5), Look(39, 190, 5, 5)], "least resident_bytes grew"),
        ([Look(39, 100, 8, 5)], "n_files grew"),
        ([Look(39, 100, 5, 8)], "n_threads grew"),
        ([], "too short"),
    ],
)
def test_what_grows_after_the_warm_up_is_a_fault(late: list[Look], told: str | None) -> None:
    run = soak()
    assert run.seconds == 40
    run.looks = [Look(1, 60, 5, 5), Look(9, 99, 5, 5), Look(11, 180, 5, 5), Look(19, 100, 5, 5)]
    run.looks += late
    run._judge_looks()
    assert [told in fault for fault in run.faults] == ([True] if told else [])


def test_counters_are_summed_by_their_labels() -> None:
    metrics = 'a_total{model_name="m",reason="stop"} 2.0\na_total{model_name="n",reason="stop"} 4.0'
    assert counter(metrics, "a_total", reason="stop") == 6
    assert counter(metrics, "a_total", model_name="m", reason="stop") == 2
    assert counter(metrics, "a_total", model_name="m", reason="length") == 0


def test_what_may_differ_does_not_count() -> None:
    answer = {"id": "x", "choices": [{"text": "a", "created": 3}], "usage": {"n": 1}}
    assert what_counts(answer) == {"choices": [{"text": "a"}], "usage": {"n": 1}}


def test_a_stream_that_breaks_off_is_not_over() -> None:
    heard = Streamed()
    assert heard.line(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n')
    assert not heard.line(b": ping\n")
    assert (heard.text, heard.is_over) == ("a", False)
    heard.line(b"data: [DONE]\n")
    assert heard.is_over


def test_every_kind_is_of_a_route_that_is_served() -> None:
    from ..server.api_doc import KINDS as ROUTES

    counts = Counter(path for path, _, _ in KINDS.values())
    assert set(counts) <= {*ROUTES, "/tokenize"}
