"""What `martlet top` shows of a server: requests, steps, KV blocks, prefixes, latencies, limits.
Owns layout and words; must not know where the figures come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from martlet.runtime.work import Speed, Work
from martlet.scripts.bench_report import GIGA, significant
from martlet.scripts.top_sample import FINISHED, Change

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR = 24  # characters
NONE = "-"
Rows = Sequence[tuple[str, str]]


def view(change: Change, speed: Speed | None) -> RenderableType:
    """speed: the limits of the server's machine, if somebody gave them."""
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.table import Table

    panels = []
    for title, rows in parts(change, speed).items():
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(name, value)
        panels.append(Panel(table, title=title, title_align="left", border_style="dim"))
    return Panel(Columns(panels), title=headline(change), border_style="dim")


def lines(change: Change, speed: Speed | None) -> list[str]:
    """The same without a terminal: `part: name: value`, one a line."""
    found = parts(change, speed).items()
    return [headline(change), *(f"{part}: {n}: {v}" for part, rows in found for n, v in rows)]


def headline(change: Change) -> str:
    stats = change.now.stats
    return f"{stats['model']} · {stats['state']} · over {change.seconds:.1f} s"


def parts(change: Change, speed: Speed | None) -> dict[str, Rows]:
    stats = change.now.stats
    return {
        "requests": requests(change),
        "steps": steps(change),
        "KV blocks": blocks(change),
        "last answers": latencies(stats.get("recent") or {}),
        "last step": last_step(stats.get("last_step"), speed),
    }


def requests(change: Change) -> Rows:
    now = change.now
    ended = [(reason, now[f"requests.{reason}"]) for reason in FINISHED]
    return [
        ("running", f"{now['requests_running']:,.0f}"),
        ("waiting", f"{now['requests_waiting']:,.0f}"),
        *((f"ended: {reason}", f"{count:,.0f}") for reason, count in ended if count),
        ("ended per second", rate(sum(change.per_s(f"requests.{r}") for r in FINISHED))),
        ("put back to wait", f"{now['preemptions']:,.0f}"),
    ]


def steps(change: Change) -> Rows:
    rows = change.ratio("rows", "steps")
    return [
        ("steps/s", rate(change.per_s("steps"))),
        ("rows per step", NONE if rows is None else significant(rows)),
        ("output tokens/s", rate(change.per_s("generation_tokens"))),
        ("prompt tokens/s", rate(change.per_s("prompt_tokens.computed"))),
        ("from the cache/s", rate(change.per_s("prompt_tokens.cached"))),
        *guesses(change),
    ]


def guesses(change: Change) -> Rows:
    right, wrong = (change.now.total("draft_tokens", end) for end in ("accepted", "rejected"))
    return [("guesses right", share(right, right + wrong))] if right + wrong else []


def blocks(change: Change) -> Rows:
    now = change.now
    total, used, cached = (now[f"kv_blocks{which}"] for which in ("", "_used", "_cached"))
    hit, computed = now["prompt_tokens.cached"], now["prompt_tokens.computed"]
    lately = change.of("prompt_tokens.cached")
    return [
        ("in use", f"{used:,.0f} of {total:,.0f}"),
        ("of the pool", bar(used, cached, total)),
        ("with known prefixes", f"{cached:,.0f}"),
        ("shared", f"{now['kv_blocks_shared']:,.0f}"),
        ("prefix hits", f"{share(hit, hit + computed)} of prompt tokens"),
        ("now", share(lately, lately + change.of("prompt_tokens.computed"))),
    ]


def bar(used: float, cached: float, total: float) -> str:
    if not total:
        return NONE
    n_used = round(BAR * used / total)
    n_cached = min(BAR - n_used, round(BAR * cached / total))
    return "█" * n_used + "▒" * n_cached + "·" * (BAR - n_used - n_cached)


def latencies(recent: dict[str, Any]) -> Rows:
    rows = [("counted", f"{recent.get('n', 0)}")]
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "per token after")):
        marks = recent.get(key) or {}
        values = [NONE if v is None else f"{significant(v)}" for v in marks.values()]
        rows.append((f"{name}, {'/'.join(marks)}", f"{' / '.join(values)} ms"))
    return rows


def last_step(step: dict[str, Any] | None, speed: Speed | None) -> Rows:
    if step is None:
        return [("", "none yet")]
    macs, seconds = step["int8_macs"] + step["f32_macs"], step["seconds"]
    binds, of_limit = step["binds"], step.get("limit_share")
    if speed:
        work = Work(step["int8_macs"], step["f32_macs"], step["bytes"])
        multiply, memory = speed.seconds(work)
        binds = "multiply" if multiply > memory else "memory"
        of_limit = max(multiply, memory) / seconds
    bound = f"{binds}, {of_limit:.0%} of it" if binds else "not known: give --int8 and --read"
    return [
        ("rows", f"{step['rows']} of {step['sequences']} sequences"),
        ("took", f"{significant(seconds * 1e3)} ms"),
        ("multiplied", f"{significant(macs / seconds / GIGA)} GMAC/s"),
        ("read", f"{significant(step['bytes'] / seconds / GIGA)} GB/s"),
        ("bound by", bound),
    ]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else NONE


def rate(value: float) -> str:
    return significant(value)
