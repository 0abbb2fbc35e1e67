"""The pictures of `martlet explain`: the roofline with its cases, and which limit binds where.
Owns the drawing; must not know where figures come from, or how a picture reaches the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from martlet.scripts import picture
from martlet.scripts.bench_report import GIGA
from martlet.scripts.explain_model import Subject
from martlet.scripts.explain_report import Line, Report
from martlet.scripts.picture import COLOUR, FAINT

INCHES = (12.0, 5.5)
MEASURED = "#c4561c"
MOST_BATCH = 64  # drawn
LEFT_OF, RIGHT_OF = 0.5, 2.0  # the roof goes on beyond the outermost cases


def draw(path: Path, report: Report, subject: Subject) -> None:
    picture.save(path, lambda: picture_of(report, subject))


def picture_of(report: Report, subject: Subject) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_roof(left, report)
    draw_regions(right, report, subject)
    figure.suptitle(
        f"{report.model['file']}, limits {report.speed_from}", fontsize="medium", parse_math=False
    )
    return figure


def draw_roof(axes: Any, report: Report) -> None:
    from matplotlib.ticker import LogLocator

    speed, lines = report.speed, report.lines
    found = [line.bound.intensity for line in lines]
    knee = speed.int8_macs / speed.n_bytes
    x = np.geomspace(min([*found, knee]) * LEFT_OF, max([*found, knee]) * RIGHT_OF, 200)
    roof = np.minimum(speed.int8_macs, x * speed.n_bytes) / GIGA
    axes.plot(x, roof, color=COLOUR, linewidth=1.5, label="limits: memory, then int8 multiplying")
    for is_prefill, marker, name in ((False, "o", "decode"), (True, "s", "prefill")):
        drawn = [line for line in lines if (line.bound.case.kind == "prefill") == is_prefill]
        draw_cases(axes, drawn, marker, name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_locator(LogLocator(subs=(1, 2, 5)))
        each.set_major_formatter("{x:,.4g}")
        each.set_minor_formatter("")
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("multiply-adds per byte")
    axes.set_ylabel("GMAC/s")
    axes.set_title("what a step can do", fontsize="medium")
    axes.legend(loc="lower right", frameon=False, fontsize="small")


def draw_cases(axes: Any, lines: Sequence[Line], marker: str, name: str) -> None:
    if not lines:
        return
    x = [line.bound.intensity for line in lines]
    y = [line.bound.work.macs / line.bound.seconds / GIGA for line in lines]
    style = {"facecolors": "white", "edgecolors": COLOUR, "marker": marker, "zorder": 3}
    axes.scatter(x, y, label=f"{name}, calculated", **style)
    measured = [line for line in lines if line.measured]
    if measured:
        x = [line.bound.intensity for line in measured]
        y = [line.bound.work.macs / m.median_s / GIGA for line in measured if (m := line.measured)]
        axes.scatter(x, y, marker=marker, color=MEASURED, zorder=4, label=f"{name}, measured")
    shallow = min(line.bound.case.depth for line in lines)
    for line in lines:
        case = line.bound.case
        text = f"{case.n_seqs}" + (f" @ {case.depth:,}" if case.depth > shallow else "")
        at = (line.bound.intensity, line.bound.work.macs / line.bound.seconds / GIGA)
        note = {"xytext": (7, -3), "textcoords": "offset points", "va": "top"}
        axes.annotate(text, at, fontsize="x-small", color=FAINT, **note)


def draw_regions(axes: Any, report: Report, subject: Subject) -> None:
    """Batch against context: multiplying binds above the line."""
    longest = max(each.n_tokens for each in report.contexts)
    contexts = np.unique(np.geomspace(1, longest, 25).astype(int))
    found = [subject.crossover(int(c)) for c in contexts]
    beyond = float(2 * MOST_BATCH)
    edge = np.array([beyond if n is None else min(float(n), beyond) for n in found])
    axes.fill_between(contexts, 1, edge, color=COLOUR, alpha=0.12, label="memory binds")
    axes.fill_between(contexts, edge, beyond, color=MEASURED, alpha=0.12, label="multiplying binds")
    axes.plot(contexts, edge, color=COLOUR, linewidth=1.5)
    for knee in report.knees:
        if knee.measured and not knee.measured.is_beyond:
            found_at = knee.measured
            error = [[found_at.n_seqs - found_at.low], [found_at.high - found_at.n_seqs]]
            axes.errorbar(
                knee.context, found_at.n_seqs, error, fmt="o", color=MEASURED, capsize=3, zorder=3,
                label="measured",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1, MOST_BATCH)
    axes.set_xlim(max(contexts[0], 1), longest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("sequences that decode together")
    axes.set_title("which limit binds", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="lower left", frameon=False, fontsize="small")
