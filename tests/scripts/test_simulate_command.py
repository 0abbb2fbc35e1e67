"""`martlet bench-steps` and `martlet simulate` as commands, and the file between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.scripts.bench_steps import measured_by
from martlet.scripts.sim_costs import CostsError, Table, costs_of
from martlet.scripts.sim_replica import Asked

from .conftest import Martlet
from .test_simulate import COSTS, cluster_of

# -- costs --------------------------------------------------------------------------------------


def test_costs_between_and_beyond() -> None:
    table = Table((1, 4, 8), (1.0, 4.0, 12.0))
    assert [table.at(n) for n in (0, 1, 2, 4, 6, 8, 10)] == [0, 1, 2, 4, 8, 12, 16]


@pytest.mark.parametrize(
    ("rows", "seconds"), [((), ()), ((2,), (1.0,)), ((1, 1), (1.0, 1.0)), ((1,), (float("nan"),))]
)
def test_tables_that_are_none(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(CostsError):
        Table(rows, seconds)


def test_a_file_gives_the_same_costs() -> None:
    assert costs_of(COSTS.as_json()) == COSTS


NONE = ["", "[]", "{}", '{"form": 1}', '{"form": 7}', '{"form": 1, "shape": 3}']


@pytest.mark.parametrize("text", NONE)
def test_a_file_that_holds_none_is_refused(text: str) -> None:
    with pytest.raises(CostsError, match=r"holds no costs|another form"):
        costs_of(text, "a.json")


# -- the commands -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(COSTS.as_json())
    return path


def test_the_command_prints_a_row_a_case(martlet: Martlet, costs_file: Path) -> None:
    said = martlet(
        "simulate", str(costs_file), "--replicas", "1,2", "--route", "least,prefix", "-n", "50"
    )
    lines = said.stdout.splitlines()
    assert lines[0].split()[:3] == ["load", "replicas", "route"]
    assert [line.split()[2:4] for line in lines[1:5]] == [
        ["1", "least"],
        ["2", "least"],
        ["1", "prefix"],
        ["2", "prefix"],
    ]
    assert "calculated" in lines[-1]


def test_the_least_replicas_are_found(martlet: Martlet, costs_file: Path) -> None:
    def run(*more: str) -> list[dict[str, Any]]:
        words = ["simulate", str(costs_file), "--rate", "30", "-n", "300", "--goodput", "ttft:300"]
        cases: list[dict[str, Any]] = json.loads(martlet(*words, *more, "--json").stdout)["cases"]
        return cases

    (found,) = run("--find", "0.9")
    n = found["replicas"]
    assert n > 1
    fewer, enough = run("--replicas", f"{n - 1},{n}")
    assert fewer["goodput.share"] < 0.9 <= enough["goodput.share"] == found["goodput.share"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--route", "nobody"), "none of turn, random, least, prefix"),
        (("--find", "0.9"), "--find wants objectives"),
        (("--prompt", "5000"), "of 1024 at most"),
        (("--rate", "9", "-n", "50", "--find", "1", "--goodput", "ttft:1"), "too slow for them"),
    ],
)
def test_what_cannot_be_is_said(
    martlet: Martlet, costs_file: Path, words: tuple[str, ...], said: str
) -> None:
    done = martlet("simulate", str(costs_file), *words)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_a_model_is_measured(tiny_file: Path) -> None:
    manner = {"threads": 1, "context": 1024, "kv_type": "f16", "depth": 64, "front_s": 0.0}
    costs = measured_by(2, str(tiny_file), manner)
    assert costs.conditions["replicas"] == 2
    assert costs.conditions["model_file"] == "tiny.gguf"
    assert all(seconds > 0 for seconds in (*costs.alone.seconds, *costs.prompt.seconds))
    cluster = cluster_of(costs=costs)
    cluster.run(iter([Asked(np.arange(20, dtype=np.int32), 10, 0.0)]))
    assert cluster.seen[0].n_output == 10
