"""What fuzzing began with and what it found, again: every kept input through its target, once.

Plain Python, without atheris. An input that was a bug is in corpus/TARGET as found-NAME, and fails
here without its fix.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from martlet.scripts import fuzz

SOME = 40  # inputs of a target that are no findings
MOST_CORPUS_BYTES = 300_000
NEEDS = {"grammar": "llguidance"}


@pytest.mark.parametrize("name", fuzz.PYTHON_TARGETS)
@pytest.mark.skipif(sys.platform == "win32", reason="its files cannot be rewritten while open")
def test_kept_inputs_do_no_harm(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "numpy"))
    target = importlib.import_module(f"{__package__}.{name}")
    paths = sorted((fuzz.CORPUS / name).iterdir(), key=lambda path: path.name)
    findings = [path for path in paths if path.name.startswith("found-")]
    others = [path for path in paths if path not in findings]
    assert others
    for path in [*findings, *others[:SOME]]:
        target.run(path.read_bytes())
    target.run(b"")


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    assert {path.name for path in fuzz.CORPUS.iterdir()} == set(fuzz.TARGETS)
    files = [path for path in fuzz.CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_CORPUS_BYTES


def test_reports_are_read() -> None:
    text = (
        "#7\tINITED cov: 110 ft: 120 corp: 6/896b exec/s: 0 rss: 53Mb\n"
        "#64\tNEW    cov: 128 ft: 130 corp: 7/900b\n"
        "#100\tDONE   cov: 128 ft: 130\nDone 100 runs in 4 second(s)\n"
        "stat::number_of_executed_units: 100\n"
    )
    report = fuzz.read_report("gguf", text, [])
    assert (report.executions, report.seconds) == (100, 4.0)
    assert (report.coverage_before, report.coverage_after) == (110, 128)
    assert "nothing found" in str(report)
    crashed = fuzz.read_report("gguf", text.split("#100")[0], [Path("crash-1")])
    assert crashed.executions == 64
    assert "FOUND crash-1" in str(crashed)


def test_unknown_targets_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "nothing"])
    with pytest.raises(SystemExit) as exit_:
        fuzz.main()
    assert exit_.value.code == 2
    assert "nothing is no target" in capsys.readouterr().err
