"""`martlet estimate` as a command: its two forms agree, and a model too long is told so."""

import json
from pathlib import Path

import pytest
from martlet.scripts.options import parse_bytes
from typer import BadParameter

from .conftest import Martlet


def test_both_forms(martlet: Martlet, tiny_file: Path) -> None:
    arguments = ("estimate", str(tiny_file), "--context", "64", "--sequences", "3")
    found = json.loads(martlet(*arguments, "--json").stdout)
    assert found["total"] == sum(
        found[k] for k in ("weights_packed", "kv_pool", "arena", "process")
    )
    assert (found["context"], found["sequences"], found["fits"]) == (64, 3, True)
    shown = martlet(*arguments).stdout
    assert found["attention"] in shown
    assert "3 x 64 tokens: fits; the longest context that fits 3 times is" in shown


def test_what_fits_from_the_file_is_said(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from martlet.runtime.estimate import MemoryEstimate
    from martlet.scripts import cli

    monkeypatch.setattr(MemoryEstimate, "fits", property(lambda self: False))
    with pytest.raises(SystemExit):
        cli.main(["estimate", str(tiny_file), "--context", "64"])
    assert "fits with weights read from the file" in capsys.readouterr().out


def test_what_does_not_fit_is_said(martlet: Martlet, tiny_file: Path) -> None:
    shown = martlet("estimate", str(tiny_file), "--context", str(10**9), "--sequences", "8")
    assert "does not fit" in shown.stdout


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("100", 100), ("2K", 2048), ("1.5M", 3 << 19), ("3g", 3 << 30)]
)
def test_sizes_are_read(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1T5", "nan", "0"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadParameter):
        parse_bytes(text)
