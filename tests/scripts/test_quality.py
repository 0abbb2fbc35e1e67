"""`martlet quality`: the table, which files are efficient, and the picture."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.scripts import picture, quality_measure, quality_plot
from martlet.scripts.bench_measure import Figure
from martlet.scripts.comparison import Comparison
from martlet.scripts.errors import ComparisonError, MissingExtra
from martlet.scripts.options import LoadOptions
from martlet.scripts.quality_measure import Size, Speed, SpeedWork, measure_speeds, size_of
from martlet.scripts.quality_report import Report, efficient, short_names

from .conftest import Martlet
from .test_logit_stats import random_scores

DATA = Path(__file__).parents[1] / "data" / "quality"
FACTS = {"activations": "int8", "kv_type": "f16", "executor": "native", "isa": "avx2"}


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(1, 1)], [True]),
        ([(1, 2), (2, 1)], [True, True]),
        ([(1, 1), (2, 2)], [True, False]),
        ([(1, 2), (1, 1)], [False, True]),  # the same size, closer
        ([(1, 1), (2, 1)], [True, False]),  # as close, larger
        ([(1, 1), (1, 1)], [True, True]),
        ([(3, 1), (1, 3), (2, 2), (2.5, 2.5)], [True, True, True, False]),
        ([], []),
    ],
)
def test_efficient_files(points: list[tuple[float, float]], best: list[bool]) -> None:
    assert efficient(points) == best


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_every_file_is_matched_by_an_efficient_one(points: list[tuple[float, float]]) -> None:
    best = [point for point, is_best in zip(points, efficient(points), strict=True) if is_best]
    assert all(any(a <= x and b <= y for a, b in best) for x, y in points)
    assert efficient(best) == [True] * len(best)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a/x.gguf", "b/y.gguf"], ["x", "y"]),
        (["a/x.gguf", "b/x.gguf"], ["a/x.gguf", "b/x.gguf"]),
        (["smollm2-135m", "a/x.gguf"], ["smollm2-135m", "x"]),
    ],
)
def test_names_are_short_where_they_can_be(files: list[str], names: list[str]) -> None:
    assert short_names(files) == names


def test_the_size_of_a_file() -> None:
    size = size_of(str(DATA / "base.gguf"))
    # 259 x 32 embeddings (tied), 2 layers of q, o 32 x 32, k, v 16 x 32, three 64 x 32; 5 norms
    assert size.n_weights == 259 * 32 + 2 * (3 * 32 * 32 + 3 * 64 * 32) + 5 * 32
    assert size.file_bytes == (DATA / "base.gguf").stat().st_size
    assert size.bits_per_weight > 32


def test_files_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def run_once(spec: str, work: SpeedWork, load: LoadOptions) -> dict[str, float]:
        order.append(spec)
        return {"prefill": float(len(order)), "decode": 1.0}

    monkeypatch.setattr(quality_measure, "run_once", run_once)
    a, b = measure_speeds(["a", "b"], SpeedWork(8, 2, 3), LoadOptions(), lambda what: None)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (a.prefill.samples, b.prefill.samples) == ((1, 4, 5), (2, 3, 6))


def make_report(n_files: int = 3, *, repeat: int = 2, n_chunks: int = 6) -> Report:
    """Each file smaller than the one before; the last is farther off than its size explains."""
    files = [f"folder (new)/file_$_{i}.gguf" for i in range(n_files)]
    scores = [random_scores(n_chunks, 31, i, scale=i + 1) for i in range(n_files)]
    sizes = [Size(1_000_000 * (n_files - i), 1_000_000) for i in range(n_files - 1)]
    sizes.append(Size(2_500_000, 1_000_000))
    figure = Figure((90.0, 110.0))
    speeds = [Speed(figure, figure)] * n_files if repeat else None
    facts: list[dict[str, Any]] = [{"model": file, **FACTS} for file in files]
    found = Comparison({"kind": "base logits", "file": "base"}, 64, facts, scores)
    conditions = {
        "prefill_rows": 8,
        "decode_steps": 2,
        "repeat": repeat,
        "threads": 2,
        "cpu": "some CPU",
        "load_average": 0.5,
    }
    return Report.of(files, sizes, speeds, found, conditions, "text.txt")


def test_markdown_says_what_is_measured_and_what_calculated() -> None:
    lines = make_report().as_markdown().splitlines()
    assert lines[0].startswith("| file | bytes | bits/weight | mean KL | 99 % | same top |")
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[2].startswith("| file_$_0 | 3,000,000 | 24.000 | 0.0")
    assert "100 (90 to 110)" in lines[2]
    assert lines[2].endswith("| yes |")
    assert lines[4].endswith("|  |")
    told = "\n".join(lines[6:])
    for words in ("measured, divergence: ", "measured, speed: ", "calculated: bits per weight"):
        assert words in told
    assert "; int8 activations, f16 cache, native/avx2, 2 threads on some CPU" in told
    assert "load average 0.5" in told


def test_without_speed_nothing_is_said_of_it() -> None:
    report = make_report(repeat=0)
    assert "tokens/s" not in report.as_markdown()
    assert report.as_json()["files"][0]["speed"] is None


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_picture_has_the_same_bytes_twice(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for path in paths:
        quality_plot.draw(path, make_report())
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert len(first) > 5000


def test_a_picture_names_files_and_marks_the_efficient(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report()
    axes = quality_plot.picture_of(report.rows, report).axes[0]
    assert axes.get_yscale() == "log"
    labels = [text.get_text() for text in axes.texts]
    assert labels == [f"file_$_{i}\n100/s" for i in range(3)]
    hollow = [tuple(dots.get_facecolor()[0][:3]) == (1, 1, 1) for dots in axes.collections[1::2]]
    assert hollow == [not row.is_efficient for row in report.rows] == [False, False, True]
    path = tmp_path / "x.svg"
    quality_plot.draw(path, report)
    assert "file_$_2" in path.read_text()


def test_a_file_that_does_not_diverge_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(2, n_chunks=1)  # which has no error bars either
    none = replace(report.rows[0].divergence.mean_kl, value=0.0)
    same = replace(report.rows[0], divergence=replace(report.rows[0].divergence, mean_kl=none))
    assert quality_plot.drawable([same, report.rows[1]]) == [report.rows[1]]
    assert "file_$_0 is not drawn" in capsys.readouterr().err
    with pytest.raises(ComparisonError, match="nothing to draw"):
        quality_plot.drawable([same])


def test_without_matplotlib_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'martlet\[plot\]'"):
        picture.check_installed()


def test_the_command(martlet: Martlet, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.svg"
    files = [str(DATA / "test.gguf"), str(DATA / "base.gguf")]
    options = ["--base", str(DATA / "base.gguf"), "-f", str(DATA / "text.txt"), "-c", "32"]
    quick = ["--executor", "reference", "--activations", "f32"]
    small = ["--repeat", "1", "--prefill", "8", "--decode", "2", "-o", str(out)]
    done = martlet("quality", *files, *options, *quick, *small, "--json")
    found = json.loads(done.stdout)
    test, base = found["files"]
    assert test["divergence"]["mean_kl"]["value"] == pytest.approx(0.01068, abs=3e-5)
    assert test["efficient"] is False  # as large as the base itself
    assert base["efficient"] is True
    assert test["speed"]["decode_tokens_per_s"]["median"] > 0
    assert found["explanations"]["measured, divergence"].startswith("what the file lost")
    assert out.read_text().startswith("<?xml")
    assert "base is not drawn" in done.stderr


def test_what_cannot_be_drawn_is_told_all_the_same(martlet: Martlet, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base, text = str(DATA / "base.gguf"), str(DATA / "text.txt")
    options = ["-f", text, "-c", "32", "--executor", "reference", "--activations", "f32"]
    out = ["--repeat", "0", "-o", str(tmp_path / "plot.svg")]
    done = martlet("quality", base, "--base", base, *options, *out, "--json")
    assert json.loads(done.stdout)["files"][0]["divergence"]["mean_kl"]["value"] == 0
    assert done.returncode == 1
    assert "nothing to draw" in done.stderr
    assert not (tmp_path / "plot.svg").exists()


def test_a_plot_of_no_known_kind_is_refused_before_measuring(martlet: Martlet) -> None:
    done = martlet("quality", "absent.gguf", "--base", "x", "-f", "x", "-o", "plot.bmp")
    assert done.returncode == 2
    assert "-o plot.bmp must end in .svg, .png, .pdf" in done.stderr


def test_numbers_of_the_report_are_those_of_the_scores() -> None:
    report = make_report()
    for row, scores in zip(report.rows, report.comparison.scores, strict=True):
        assert row.divergence.mean_kl.value == pytest.approx(np.mean(scores["kl"]))
        assert math.isfinite(row.divergence.mean_kl.error)
