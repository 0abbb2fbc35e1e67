"""`martlet bench-speculate` on a tiny model: what it says, and that texts stayed the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from martlet.runtime.step_costs import StepCosts
from martlet.scripts.bench_speculate import DEFINITIONS, expected_ratio
from martlet.scripts.cli import main

from .tiny_file import write_tiny_model


def test_a_run_tells_rows_for_every_case(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    words = ["--acceptance", "0,1", "--batch", "1,3", "--decode", "12", "--repeat", "1", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bench-speculate", str(path), "--executor", "reference", *words])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["acceptance"]) for row in told["rows"]] == [
        (1, 0.0),
        (1, 1.0),
        (3, 0.0),
        (3, 1.0),
    ]
    for row in told["rows"]:
        assert row["plain"] > 0
        assert row["expected"] >= 1
        assert row["accepted"] <= row["drafted"]
        assert row["acceptance"] or not row["accepted"]
    assert told["definitions"] == DEFINITIONS
    assert told["costs"]["1"] == 1


def test_the_expectation_is_that_of_the_best_length() -> None:
    free, dear = StepCosts({1: 1.0, 16: 1.0}), StepCosts({1: 1.0, 16: 16.0})
    assert expected_ratio(free, 1.0, 1) == pytest.approx(9)
    assert expected_ratio(free, 0.5, 1) == pytest.approx(2 - 0.5**8)
    assert expected_ratio(dear, 1.0, 1) == pytest.approx(1)
    assert expected_ratio(dear, 0.5, 2) == 1
