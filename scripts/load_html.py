"""Records of a load as one HTML page with plots, which loads nothing from elsewhere.
Owns what is plotted and in which words; drawing is in svg_plot.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from martlet.runtime.aggregates import percentile
from martlet.runtime.latency import DEFINITIONS
from martlet.scripts.bench_report import significant
from martlet.scripts.load_report import COLUMNS, remarks, spread
from martlet.scripts.records import Record
from martlet.scripts.svg_plot import Bar, Line, escape, plot, timeline

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--dim:#5f6b76;--edge:#d9dee3;--soft:#f4f6f8;
--c0:#2563c9;--c1:#c2410c;--c2:#15803d;--c3:#7e3bb8;--c4:#a16207;--c5:#0e7490}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e9ec;--dim:#98a3ad;--edge:#30373e;
--soft:#1c2126;--c0:#6ea8fe;--c1:#fb923c;--c2:#4ade80;--c3:#c48cf5;--c4:#eab308;--c5:#22d3ee}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:88rem;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:.95rem;margin:.2rem 0 .4rem;font-weight:600}
p{margin:.3rem 0;max-width:60rem}.dim,.none{color:var(--dim)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem;border:1px solid var(--edge);border-radius:.5rem;min-width:0}
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font-size:11.5px}
.mid{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--edge);stroke-width:1;fill:none}
.line{fill:none;stroke:var(--c);stroke-width:2}.dashed{stroke-dasharray:5 4}
.dot,.bar{fill:var(--c)}.faint{opacity:.35}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}
.key{display:inline-block;width:1.6rem;border-top:.18rem solid var(--c);margin-right:.4rem;
vertical-align:.2rem}.key.dashed{border-top-style:dashed}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--edge);text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.text td{white-space:normal;text-align:left;overflow-wrap:anywhere}
.text th{text-align:left}.text td:first-child{white-space:nowrap;overflow-wrap:normal}
thead th{background:var(--soft)}
@media(max-width:40rem){svg text{font-size:19px}}
details{margin:.6rem 0}summary{cursor:pointer}
"""
AT_ONCE_S = 0.002
GAP_MARKS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 100)


def page(records: Sequence[Record]) -> str:
    first = records[0]
    labels = list(dict.fromkeys(record.label for record in records))
    title = f"Under load: {' / '.join(labels)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_conditions_line(first)}"
        f"<h2>Figures</h2>{_table(records)}{_remarks(records)}"
        f"{_against_load(records, labels)}"
        f"{''.join(_side(record, labels.index(record.label)) for record in records)}"
        f"<h2>Conditions</h2>{_conditions(records)}"
        f"<h2>What the figures mean</h2>{_meanings()}</body></html>\n"
    )


def _conditions_line(record: Record) -> str:
    told = record.conditions
    names = ("cpu", "cores", "threads", "model_file", "prompt_tokens", "output_tokens", "cache")
    parts = (f"{name.replace('_', ' ')}: {told[name]}" for name in names if name in told)
    return f'<p class="dim">{escape(" · ".join(parts))}</p>'


def _table(records: Sequence[Record]) -> str:
    heads = "".join(f"<th>{escape(title)}</th>" for title, *_ in COLUMNS)
    rows = ""
    for record in records:
        cells = ""
        for _, name, factor in COLUMNS:
            figure = record.figures.get(name)
            if figure is None:
                cells += "<td>-</td>"
                continue
            low, high = min(figure.samples), max(figure.samples)
            cells += (
                f'<td title="{significant(factor * low)} to {significant(factor * high)}">'
                f"{significant(factor * figure.median)}</td>"
            )
        label = f"{record.label}, {record.conditions['load']}"
        rows += f"<tr><td>{escape(label)}</td>{cells}<td>{spread(record)}</td></tr>"
    repeats = records[0].conditions["repeats"]
    return (
        f'<div class="wide"><table><thead><tr><th>side, load</th>{heads}<th>spread</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
        f'<p class="dim">Measured; medians of {repeats} runs, times in ms. '
        "Spread: (max - min) ÷ median of out tok/s.</p>"
    )


def _remarks(records: Sequence[Record]) -> str:
    found = dict.fromkeys(remark for record in records for remark in remarks(record))
    items = "".join(f"<li>{escape(remark)}</li>" for remark in found)
    return f"<ul>{items}</ul>" if found else ""


def _against_load(records: Sequence[Record], labels: Sequence[str]) -> str:
    amounts = {record.details["load"]["amount"] for record in records}
    is_open = "/s" in str(records[0].conditions["load"])
    x_title = "requests per second" if is_open else "streams"
    if len(amounts) < 2:
        return ""

    def lines(names: Sequence[str]) -> list[Line]:
        found = []
        for nth, label in enumerate(labels):
            for which, name in enumerate(names):
                points = sorted(
                    (record.details["load"]["amount"], record.figures[name].median)
                    for record in records
                    if record.label == label and name in record.figures
                )
                mark = name.partition(".")[2]
                shown = f"{label} {mark}".strip()
                found.append(Line(shown, points, nth, is_dashed=which > 0))
        return found

    plots = (
        ("Time to first token", ("ttft_ms.p50", "ttft_ms.p95"), "ms"),
        ("Time per output token", ("tpot_ms.p50", "tpot_ms.p95"), "ms"),
        ("Output throughput", ("output_tokens_per_s",), "tokens/s"),
        ("End to end", ("end_to_end_ms.p50", "end_to_end_ms.p95"), "ms"),
    )
    figures = "".join(
        _figure(f"{title}, {unit}", plot(lines(names), x_title, is_of_loads=True))
        for title, names, unit in plots
    )
    return f'<h2>Latency against load</h2><div class="plots">{figures}</div>'


def _side(record: Record, colour: int) -> str:
    """The last run in pictures: it is the warmest."""
    runs = record.details["runs"]
    run = runs[-1]
    figures = [
        ("Timeline: waiting for the first token (pale), then decoding", _timeline(run, colour)),
        ("Requests in flight", _in_flight(run, colour)),
        ("Gaps between pieces of a stream, ms, all runs", _gaps(runs, colour)),
    ]
    if run["kv"]:  # not every server tells
        figures.append(("KV cache held by running requests, %", _kv(run, colour)))
    title = f"{record.label}, {record.conditions['load']}"
    drawn = "".join(_figure(*each) for each in figures)
    return f'<h2>{escape(title)}</h2><div class="plots">{drawn}</div>'


def _timeline(run: dict[str, Any], colour: int) -> str:
    bars, requests = [], run["requests"]
    for row, each in enumerate(requests):
        due, end = each["due_s"], each["end_s"]
        first = due + each["pieces_ms"][0] / 1e3 if each["pieces_ms"] else end
        title = (
            f"request {row}: {each['n_prompt']} prompt ({each['n_cached']} cached) +"
            f" {each['n_output']} output tokens, {each['outcome']}"
        )
        bars.append(Bar(row, due, first, colour, title, is_faint=True))
        bars.append(Bar(row, first, end, colour, title))
    return timeline(bars, len(requests), _end(run), "seconds")


def _end(run: dict[str, Any]) -> float:
    return max((each["end_s"] for each in run["requests"]), default=0.0)


def _in_flight(run: dict[str, Any], colour: int) -> str:
    changes = [(each["due_s"], 1) for each in run["requests"]]
    changes += [(each["end_s"], -1) for each in run["requests"]]
    points, n = [(0.0, 0.0)], 0
    for at, change in sorted(changes):
        n += change
        if at - points[-1][0] < AT_ONCE_S:  # a stream that asks again at once leaves no gap
            at, _ = points.pop()
        points.append((at, float(n)))
    line = Line("requests", points, colour, has_dots=False, is_stepped=True)
    return plot([line], "seconds")


def _kv(run: dict[str, Any], colour: int) -> str:
    points = [(at, 100 * share) for at, share in run["kv"]]
    line = Line("of the cache", points, colour, has_dots=False)
    return plot([line], "seconds")


def _gaps(runs: Iterable[dict[str, Any]], colour: int) -> str:
    """How long a gap is at each percentile: the tail is what readers feel."""
    gaps = [
        after - before
        for run in runs
        for each in run["requests"]
        for before, after in pairwise(each["pieces_ms"])
    ]
    marks = ((mark, percentile(gaps, mark)) for mark in GAP_MARKS)
    points = [(float(mark), value) for mark, value in marks if value is not None]
    n = f"{len(gaps)} gaps"
    return plot([Line(n, points, colour)] if points else [], "percentile")


def _figure(title: str, drawn: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{drawn}</figure>"


def _conditions(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record.conditions))
    equal: list[tuple[str, list[str]]] = []
    other: list[tuple[str, list[str]]] = []
    for name in names:
        values = [str(record.conditions.get(name, "-")) for record in records]
        (equal if len(set(values)) == 1 else other).append((name, values))
    rows = "".join(f"<tr><td>{escape(n)}</td><td>{escape(v[0])}</td></tr>" for n, v in equal)
    found = (
        f'<details open><summary>Alike</summary><div class="wide"><table class="text">{rows}'
        "</table></div></details>"
    )
    if other:
        heads = "".join(
            f"<th>{escape(record.label)}, {escape(str(record.conditions['load']))}</th>"
            for record in records
        )
        rows = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
            for name, values in other
        )
        found += (
            '<details open><summary>Different</summary><div class="wide"><table class="text">'
            f"<thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )
    return found


def _meanings() -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(each.meaning)}</td></tr>"
        for name, each in DEFINITIONS.items()
    )
    return f'<div class="wide"><table class="text">{rows}</table></div>'
