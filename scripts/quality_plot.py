"""The picture of `martlet quality`: file size against KL divergence, markers by speed.
Owns the drawing; must not know where figures come from, or how a picture reaches the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from martlet.scripts import picture
from martlet.scripts.console import note
from martlet.scripts.errors import ComparisonError
from martlet.scripts.picture import COLOUR, FAINT
from martlet.scripts.quality_report import Report, Row

INCHES = (8.0, 5.5)
AREA = 40.0  # points² of a marker without a speed; of the slowest file with one
MEBIBYTE = 1 << 20


def draw(path: Path, report: Report) -> None:
    rows = drawable(report.rows)
    picture.save(path, lambda: picture_of(rows, report))


def drawable(rows: Sequence[Row]) -> list[Row]:
    """A logarithmic axis has no place for a divergence of 0."""
    for row in rows:
        if row.divergence.mean_kl.value <= 0:
            note(f"{row.name} is not drawn: it does not diverge from the base")
    kept = [row for row in rows if row.divergence.mean_kl.value > 0]
    if not kept:
        raise ComparisonError("there is nothing to draw: no file diverges from the base")
    return kept


def picture_of(rows: Sequence[Row], report: Report) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    best = sorted((row for row in rows if row.is_efficient), key=size_mib)
    axes.plot(
        [size_mib(row) for row in best],
        [row.divergence.mean_kl.value for row in best],
        color=COLOUR,
        linewidth=1,
        zorder=1,
        label="no other file is both smaller and closer",
    )
    slowest = min((row.speed.decode.median for row in rows if row.speed), default=1.0)
    for row in rows:
        draw_row(axes, row, slowest)
    axes.set_yscale("log")
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3)
    axes.set_xlabel("file, MiB")
    axes.set_ylabel("mean KL divergence from the base, nats per token")
    area = "; marker area: decode tokens/s" if report.has_speed else ""
    title = f"{report.comparison.n_ctx}-token chunks, {rows[0].divergence.n_scored:,} scored{area}"
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="upper right", frameon=False)
    return figure


def draw_row(axes: Any, row: Row, slowest: float) -> None:
    x, kl = size_mib(row), row.divergence.mean_kl
    colour = COLOUR if row.is_efficient else FAINT
    filling = colour if row.is_efficient else "white"
    area = AREA * (row.speed.decode.median / slowest if row.speed else 1)
    if kl.error == kl.error:  # NaN with one chunk
        axes.errorbar(x, kl.value, kl.error, color=colour, capsize=3, linewidth=1, zorder=2)
    axes.scatter(x, kl.value, s=area, color=filling, edgecolors=colour, zorder=3)
    speed = f"\n{row.speed.decode.median:,.0f}/s" if row.speed else ""
    axes.annotate(
        f"{row.name}{speed}",
        (x, kl.value),
        xytext=(9, 5),
        textcoords="offset points",
        fontsize="small",
        color=colour,
        parse_math=False,  # names may hold dollars
    )


def size_mib(row: Row) -> float:
    return row.size.file_bytes / MEBIBYTE
