"""`martlet bench-speculate` on a tiny model: what it says, and that texts stayed the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from martlet.quant.errors import MartletError
from martlet.runtime.step_costs import StepCosts
from martlet.scripts.bench_speculate import DEFINITIONS, expected_ratio
from martlet.scripts.cli import main
from martlet.scripts.lookup_tasks import SAME, copying_task, read_tasks, repeated_share
from martlet.scripts.speculate_runs import Pairs

from ..runtime.scripted import ScriptedTokenizer
from .tiny_file import write_tiny_model


def told(capsys: pytest.CaptureFixture, path: Path, *words: str) -> Any:
    words = ("--executor", "reference", "--repeat", "2", "--json", *words)
    with pytest.raises(SystemExit) as ended:
        main(["bench-speculate", str(path), *words])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_tells_rows_for_every_case(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    found = told(capsys, path, "--acceptance", "0,1", "--batch", "1,3", "--decode", "12")
    assert [(row["batch"], row["acceptance"]) for row in found["rows"]] == [
        (1, 0.0),
        (1, 1.0),
        (3, 0.0),
        (3, 1.0),
    ]
    for row in found["rows"]:
        assert row["plain"] > 0
        assert row["expected"] >= 1
        assert row["accepted"] <= row["drafted"]
        assert row["acceptance"] or not row["accepted"]
    assert found["definitions"] == DEFINITIONS
    assert found["costs"]["1"] == 1


def test_outputs_of_tasks_are_dictated(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, tasks = write_tiny_model(tmp_path / "tiny.gguf"), tmp_path / "tasks.jsonl"
    text = "one two three four five six seven"
    lines = [
        {"name": "copy", "prompt": text, "output": text},
        {"name": "other", "prompt": text, "output": "zz yy ww"},
    ]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    found = told(capsys, path, "--lookup", str(tasks), "--batch", "1,2")["rows"]
    assert [(row["task"], row["batch"]) for row in found] == [
        ("copy", 1),
        ("copy", 2),
        ("other", 1),
        ("other", 2),
    ]
    assert found[0]["share"] > 0.9 > 0.1 > found[2]["share"]
    tasks.write_text('{"name": "copy"}')
    with pytest.raises(MartletError, match="line 1: expected a JSON object with name"):
        list(read_tasks(tasks, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--own",), "no block that guesses"),
        (("--own", "--lookup-share", "0.5"), "one kind of guess"),
        (("--lookup-share", "0.5", "--draft-vocab", "10"), "a lookup has no output matrix"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, options: tuple[str, ...], said: str
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(SystemExit) as ended:
        main(["bench-speculate", str(path), "--executor", "reference", *options])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_made_outputs_repeat_as_much_as_is_asked_for(share: float) -> None:
    made = copying_task(share, ScriptedTokenizer(), 400)
    assert made.share == pytest.approx(share, abs=0.05)
    assert len(made.task.output or []) == 400


def test_what_repeats_is_in_runs() -> None:
    prompt = list(range(20))
    assert repeated_share(prompt, [3, 4, 5, 6, 50, 7, 8, 9]) == 4 / 8
    assert repeated_share(prompt, [0, 1, 2, 9, 8, 7]) == 0
    assert SAME == 4


def test_runs_with_guesses_are_compared_with_their_neighbours() -> None:
    pairs = Pairs(10, plain=[1.0, 3.0, 1.0], auto=[1.0, 4.0])
    assert pairs.between == [2.0, 2.0]
    assert pairs.ratio.value == pytest.approx(1.0)
    assert pairs.control.value == pytest.approx(1.0)
    assert pairs.ratio.low < 1 < pairs.ratio.high


def test_the_expectation_is_that_of_the_best_length() -> None:
    free, dear = StepCosts({1: 1.0, 16: 1.0}), StepCosts({1: 1.0, 16: 16.0})
    assert expected_ratio(free, 1.0, 1) == pytest.approx(9)
    assert expected_ratio(free, 0.5, 1) == pytest.approx(2 - 0.5**8)
    assert expected_ratio(dear, 1.0, 1) == pytest.approx(1)
    assert expected_ratio(dear, 0.5, 2) == 1
