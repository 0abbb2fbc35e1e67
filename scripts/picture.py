"""Pictures in files: what can be drawn, and how it reaches the disk.
Owns the formats and the library's presence; must not know what is in a picture. Drawn twice, a file
has the same bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from martlet.quant.whole_file import whole_or_nothing
from martlet.scripts.errors import MissingExtra

SUFFIXES = (".svg", ".png", ".pdf")
DOTS_PER_INCH = 120
COLOUR, FAINT = "#1f5f8b", "#8a8a8a"


def check(path: Path) -> None:
    """Before minutes of work. Raises BadParameter and MissingExtra."""
    if path.suffix not in SUFFIXES:
        raise typer.BadParameter(f"-o {path} must end in {', '.join(SUFFIXES)}.")
    check_installed()


def check_installed() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra(
            "drawing needs matplotlib: `pip install 'martlet[plot]'` brings it; or leave -o out"
        )


def save(path: Path, make: Callable[[], Any]) -> None:
    """make: gives matplotlib's Figure. In the format of the path's suffix."""
    import matplotlib as mpl

    suffix = path.suffix.removeprefix(".")
    # No random ids, and text that stays text.
    style: Any = {"svg.hashsalt": "martlet", "svg.fonttype": "none"}
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with mpl.rc_context(style), whole_or_nothing(path) as out:
        make().savefig(out, format=suffix, dpi=DOTS_PER_INCH, metadata=metadata)
