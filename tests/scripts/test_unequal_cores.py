"""The share of the ideal, on times that a person can check; and a run on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from martlet.scripts.bench_cases import Case
from martlet.scripts.unequal_cores import line, unequal_cores

from ..runtime.native_library import ISAS  # skips the file where there is no native library


def test_the_share_of_the_ideal() -> None:
    told = line(Case("decode", 30), [1.0, 1.0, 9.0], [2.0, 1.5, 4.0], threads=2, slower=1.0)
    # 1.5 of 2 cores: 0.75 of the rate would be ideal, 1 / 2 was found
    assert "equal 30.0 tokens/s, slowed 15.0: 67% of the ideal 0.75" in told
    assert "(67% to 300% in 3 turns)" in told


@pytest.mark.skipif(not ISAS, reason="no native library")
def test_both_cases_are_measured(tiny_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unequal_cores(str(tiny_file), threads=2, slower=1.0, repeat=1)
    lines = capsys.readouterr().out.splitlines()
    assert [told.split()[0] for told in lines] == ["prefill", "decode"]
