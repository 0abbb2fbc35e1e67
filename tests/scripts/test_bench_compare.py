"""Comparisons are refused by name where they would mislead, and ranks are sure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.scripts.bench_compare import rank, verdicts
from martlet.scripts.cli import main
from martlet.scripts.compare_rules import MUST_KNOW
from martlet.scripts.intervals import ratio, student
from martlet.scripts.records import Figure, Record, RecordError, read_records, write_records

OUT = "output_tokens_per_s"
KNOWN: dict[str, Any] = {name: f"some {name}" for name in MUST_KNOW} | {"prompt_tokens": "100"}
FAST, SLOW = (100.0, 101.0, 102.0, 100.5), (80.0, 81.0, 79.5, 80.5)


def record(label: str, samples: tuple[float, ...] = FAST, **conditions: Any) -> Record:
    session = conditions.pop("session", "")
    grade = conditions.pop("grade", "measured")
    known = {**KNOWN, **conditions}
    known = {name: value for name, value in known.items() if value is not None}
    return Record(label, known, {OUT: Figure(samples, "tokens/s", grade)}, session)


def judged(*records: Record, varies: tuple[str, ...] = ()) -> Any:
    (verdict,) = verdicts(records, [OUT], varies)
    return verdict


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (record("b", SLOW, prompt_tokens="512"), "prompt_tokens differs: 100 / 512"),
        (record("b", SLOW, output_tokens="8"), "output_tokens differs: some output_tokens / 8"),
        (record("b", SLOW, threads=None), "threads is not known of b"),
        (record("b", SLOW, cache="warm"), "cache differs: some cache / warm"),
        (record("b", SLOW, model_type="Q8_0"), "model_type differs: some model_type / Q8_0"),
        (record("b", SLOW, kv_type="q8_0"), "kv_type differs: some kv_type / q8_0"),
        (record("b", SLOW[:1]), "b has 1 repeat, at least 3 are needed to know its spread"),
        (record("b", SLOW[:2]), "b has 2 repeats, at least 3 are needed to know its spread"),
        (
            record("b", SLOW, grade="vendor-reported"),
            "b is vendor-reported; only measured figures are ranked",
        ),
        (record("b", SLOW, cpu="another"), "cpu differs: some cpu / another"),
        (record("b", SLOW, turns=3), "turns is only known of some: 3"),
        (record("b", (80.0, 81.0, 0.0)), "b is not above 0 in every repeat: it has no ratio"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(other: Record, reason: str) -> None:
    verdict = judged(record("a"), other)
    assert verdict.ranking == []
    assert reason in verdict.against
    assert f"because {reason}" in verdict.as_text()


@pytest.mark.parametrize("session", ["", "same"])
def test_a_fair_pair_is_ranked(session: str) -> None:
    """Engine, version and flags may differ: they are what is compared."""
    slow = record("slow", SLOW, engine="x", flags="-t 2", session=session)
    first, second = judged(slow, record("fast", engine="y", session=session)).ranking
    assert (first.place, first.record.label) == (1, "fast")
    assert (second.place, second.record.label) == (2, "slow")
    assert second.to_best.is_paired == bool(session)
    assert second.to_best.low < 0.8 < second.to_best.high < 1


def test_less_time_is_better() -> None:
    figures = {"a": FAST, "b": SLOW}
    records = [
        Record(label, KNOWN, {"ttft_ms.p50": Figure(samples, "ms", is_higher_better=False)})
        for label, samples in figures.items()
    ]
    assert [each.record.label for each in rank("ttft_ms.p50", records)] == ["b", "a"]


def test_differences_within_the_noise_are_ties() -> None:
    noisy = record("noisy", (90.0, 110.0, 95.0, 108.0))
    verdict = judged(record("a"), noisy)
    assert [each.place for each in verdict.ranking] == [1, 1]
    assert "tie with the first" in verdict.as_text()


def test_pairs_of_one_session_cancel_what_disturbs_both() -> None:
    """The machine's pace halves and doubles; one is always a tenth faster."""
    paces = (50.0, 100.0, 70.0, 130.0)
    slow, fast = paces, tuple(1.1 * pace * (1 + 0.001 * i) for i, pace in enumerate(paces))
    apart = judged(record("slow", slow), record("fast", fast))
    assert [each.place for each in apart.ranking] == [1, 1]
    beside = judged(record("slow", slow, session="s"), record("fast", fast, session="s"))
    assert [(each.place, each.record.label) for each in beside.ranking] == [
        (1, "fast"),
        (2, "slow"),
    ]


def test_one_difference_can_be_what_is_compared() -> None:
    q4, q8 = record("q4", model_type="Q4"), record("q8", SLOW, model_type="Q8")
    refused = judged(q4, q8)
    assert refused.instead == ["--varies model_type: then model_type is what is compared"]
    assert len(judged(q4, q8, varies=("model_type",)).ranking) == 2


def test_of_three_the_valid_pairs_are_offered() -> None:
    verdict = judged(record("a"), record("b", SLOW, cache="warm"), record("c", SLOW))
    assert verdict.instead[0] == "only records 1 (a) and 3 (c)"


def test_a_missing_condition_has_no_way_round() -> None:
    assert judged(record("a"), record("b", SLOW, threads=None), varies=("threads",)).against
    assert judged(record("a"), record("b", SLOW, threads=None)).instead == []


def test_students_t_is_the_tables() -> None:
    for freedom, expected in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (30, 2.0423)):
        assert student(0.95, freedom) == pytest.approx(expected, abs=1e-4)
    assert student(0.99, 4) == pytest.approx(4.6041, abs=1e-4)


SAMPLES = st.lists(st.floats(0.1, 1e4), min_size=2, max_size=8)


@given(SAMPLES, SAMPLES, st.floats(0.1, 10))
def test_intervals_hold_their_ratio_and_scale(a: list[float], b: list[float], by: float) -> None:
    found = ratio(a, b, is_paired=False, confidence=0.95)
    assert found.low <= found.value <= found.high
    back = ratio(b, a, is_paired=False, confidence=0.95)
    assert math.isclose(back.low, 1 / found.high, rel_tol=1e-6)
    scaled = ratio([by * each for each in a], b, is_paired=False, confidence=0.95)
    assert math.isclose(scaled.value, by * found.value, rel_tol=1e-6)
    assert ratio(a, a, is_paired=True, confidence=0.95).is_tie


def test_intervals_are_as_sure_as_they_say() -> None:
    """Of 400 pairs of runs of one and the same thing, about 5 % seem to differ."""
    from random import Random

    draw = Random(1)

    def runs() -> list[float]:
        return [draw.lognormvariate(4, 0.1) for _ in range(4)]

    wrong = sum(
        not ratio(runs(), runs(), is_paired=False, confidence=0.95).is_tie for _ in range(400)
    )
    assert 6 <= wrong <= 36


def test_a_table_typed_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vendor, ours = tmp_path / "vendor.json", tmp_path / "ours.json"
    told = ["--figure", f"{OUT}=250", "--condition", "cpu=some cpu", "--condition", "threads=8"]
    with pytest.raises(SystemExit) as done:
        main(["bench-record", str(vendor), "--label", "x", "--source", "a page", *told])
    assert done.value.code == 0
    assert "not told: isa, cores, quota" in capsys.readouterr().err
    (kept,) = read_records(vendor)
    assert (kept.source, kept.conditions["threads"]) == ("a page", 8)
    assert kept.figures[OUT].grade == "vendor-reported"
    write_records(ours, [record("ours")])
    with pytest.raises(SystemExit) as done:
        main(["bench-compare", str(ours), str(vendor), "--json"])
    assert done.value.code == 1
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["ranking"] == []
    assert "x is vendor-reported; only measured figures are ranked" in verdict["refused_because"]
    assert "isa is not known of x" in verdict["refused_because"]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path, kept = tmp_path / "r.json", record("a", session="s")
    write_records(path, [kept])
    assert read_records(path) == [kept]
    path.write_text(path.read_text().replace('"measured"', '"guessed"'))
    with pytest.raises(RecordError, match="'guessed'; there are measured, calculated"):
        read_records(path)
    path.write_text("{}")
    with pytest.raises(RecordError, match="is not of the form"):
        read_records(path)


def test_commands_compare_each_load_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    records = [
        record(label, samples, load=load)
        for load in ("1 streams", "8 streams")
        for label, samples in (("a", FAST), ("b", SLOW))
    ]
    write_records(path, records)
    with pytest.raises(SystemExit) as done:
        main(["bench-compare", str(path)])
    assert done.value.code == 0
    told = capsys.readouterr().out
    assert f"{OUT} (1 streams), more is better" in told
    assert f"{OUT} (8 streams), more is better" in told
    assert told.count("  1. a: 100.8 tokens/s (measured, 100 to 102 in 4)") == 2
