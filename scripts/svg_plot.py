"""Small plots as SVG text: axes with round numbers, lines, dots, bars, a legend.
Owns scales and drawing; must not know what is drawn. Colours come from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 20, 12, 44
N_COLOURS = 6


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_dashed: bool = False
    has_dots: bool = True
    is_stepped: bool = False


@dataclass(frozen=True)
class Bar:
    """Of one row of a timeline: from start to end on the x axis."""

    row: int
    start: float
    end: float
    colour: int
    title: str = ""
    is_faint: bool = False


@dataclass(frozen=True)
class Axis:
    """A scale: from low to high onto pixels, linear or by powers of ten."""

    low: float
    high: float
    from_px: float
    to_px: float
    is_log: bool = False
    marks: tuple[float, ...] = ()
    """Where a logarithmic one has its numbers."""

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = (value - low) / (high - low)
        return self.from_px + share * (self.to_px - self.from_px)

    def ticks(self) -> list[float]:
        if self.is_log:
            return list(self.marks)
        step = round_step((self.high - self.low) / 5)
        n = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(n, math.floor(self.high / step + 1e-9) + 1)]


def round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, at least `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= about * 0.999)


def plot(lines: Sequence[Line], x_title: str, *, is_of_loads: bool = False) -> str:
    """Lines over a y axis from 0. is_of_loads: the x axis has powers, and the points' own marks."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        return '<p class="none">nothing was told of this</p>'
    low, high = min(xs), max(xs)
    if low == high:
        low, high = (low / 2, high * 2) if is_of_loads else (low - 0.5, high + 0.5)
    x = Axis(low, high, LEFT, WIDTH - RIGHT, is_log=is_of_loads, marks=tuple(sorted({*xs})))
    y = Axis(0, max(*ys, 1e-9) * 1.05, HEIGHT - BOTTOM, TOP)
    parts = [frame(x, y, x_title)]
    for line in lines:
        parts.append(_line(line, x, y))
    return svg("".join(parts), HEIGHT) + legend(lines)


def _line(line: Line, x: Axis, y: Axis) -> str:
    points = [(x.at(a), y.at(b)) for a, b in line.points]
    path = ""
    for nth, (px, py) in enumerate(points):
        if line.is_stepped and nth:
            path += f"H{px:.1f}"
        path += f"{'L' if nth else 'M'}{px:.1f} {py:.1f}"
    dash = " dashed" if line.is_dashed else ""
    found = f'<path class="line c{line.colour % N_COLOURS}{dash}" d="{path}"/>'
    if line.has_dots:
        for (px, py), (a, b) in zip(points, line.points, strict=True):
            found += (
                f'<circle class="dot c{line.colour % N_COLOURS}" cx="{px:.1f}" cy="{py:.1f}" r="3">'
                f"<title>{escape(line.label)}: {number(b)} at {number(a)}</title></circle>"
            )
    return found


def timeline(bars: Sequence[Bar], n_rows: int, end: float, x_title: str) -> str:
    """Rows from the top, one above the other."""
    thick = 14 if n_rows <= 24 else max(3.0, 340 / n_rows)
    height = TOP + thick * n_rows + BOTTOM
    x = Axis(0, max(end, 1e-9), LEFT, WIDTH - RIGHT)
    y = Axis(n_rows, 0, height - BOTTOM, TOP)
    parts = [frame(x, y, x_title, has_y_ticks=False)]
    for bar in bars:
        width = max(0.5, x.at(bar.end) - x.at(bar.start))
        faint = " faint" if bar.is_faint else ""
        parts.append(
            f'<rect class="bar c{bar.colour % N_COLOURS}{faint}" x="{x.at(bar.start):.1f}"'
            f' y="{y.at(bar.row) + 1:.1f}" width="{width:.1f}" height="{max(1.5, thick - 2):.1f}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return svg("".join(parts), height)


def frame(x: Axis, y: Axis, x_title: str, *, has_y_ticks: bool = True) -> str:
    """Grid and numbers of both axes, and what the lower one is."""
    parts = []
    bottom, top = y.from_px, y.to_px
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {top}V{bottom:.1f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15:.1f}" class="mid">{number(tick)}</text>')
    for tick in y.ticks() if has_y_ticks else ():
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{x.from_px} {at:.1f}H{x.to_px}"/>')
        parts.append(
            f'<text x="{x.from_px - 6}" y="{at + 4:.1f}" class="end">{number(tick)}</text>'
        )
    middle = (x.from_px + x.to_px) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 33:.1f}" class="mid">{escape(x_title)}</text>')
    return "".join(parts)


def svg(inside: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{inside}</svg>'


def legend(lines: Sequence[Line]) -> str:
    keys = (
        f'<span><i class="key c{line.colour % N_COLOURS}{" dashed" if line.is_dashed else ""}"></i>'
        f"{escape(line.label)}</span>"
        for line in lines
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def number(value: float) -> str:
    """Short: 0.05, 1.5, 250, 12k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def escape(text: str) -> str:
    return html.escape(text, quote=True)
