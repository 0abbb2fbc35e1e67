"""Ratios between martlet and its peers, as JSON or as tables.
Owns what is divided by what; must not know how anything was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from martlet.runtime.machine import allowed_cpus
from martlet.runtime.work import Speed, Work, steps_work
from martlet.scripts.bench_cases import Case
from martlet.scripts.bench_measure import Figure, kv_value_bytes, share_of_limit
from martlet.scripts.bench_open import Opened
from martlet.scripts.bench_peers import MARTLET, Alternation
from martlet.scripts.bench_report import figure_json, heading, limit_lines, significant, table
from martlet.scripts.peer_llama import LlamaCpp


@dataclass(frozen=True)
class Report:
    opened: Opened
    peers: Sequence[LlamaCpp]
    cases: Sequence[Case]
    levels: Sequence[int]
    found: Alternation
    work: dict[Case, Work]
    speed: Speed | None

    @classmethod
    def of(
        cls,
        opened: Opened,
        peers: Sequence[LlamaCpp],
        cases: Sequence[Case],
        levels: Sequence[int],
        found: Alternation,
    ) -> Report:
        value_bytes = kv_value_bytes(opened.bench, opened.plan)
        work = {c: steps_work(opened.plan, opened.bench.steps(c), value_bytes) for c in cases}
        return cls(opened, peers, cases, levels, found, work, opened.limits.speed())

    @property
    def sides(self) -> list[str]:
        return [MARTLET, *(peer.name for peer in self.peers)]

    def of_limit(self, side: str, case: Case) -> float | None:
        """Share of the limit at the quiet median; the work is what martlet's plan asks for."""
        samples = self.found.of(side, 0, case)
        if not samples:
            return None
        seconds = case.tokens_in_all / statistics.median(samples)
        share = share_of_limit(self.work[case], seconds, self.speed)
        return share.of_limit if share else None

    def ratio(self, peer: str, busy: int, case: Case) -> Figure | None:
        """martlet ÷ peer, turn by turn."""
        return quotient(self.found.of(MARTLET, busy, case), self.found.of(peer, busy, case))

    def of_quiet(self, side: str, busy: int, case: Case) -> Figure | None:
        return quotient(self.found.of(side, busy, case), self.found.of(side, 0, case))

    def fair_share(self, busy: int) -> float:
        """What a scheduler that is fair to threads leaves for ours."""
        return min(1.0, len(allowed_cpus()) / (self.opened.n_threads + busy))

    def as_json(self) -> dict[str, Any]:
        limits = self.opened.limits.figures()
        return {
            **self.opened.facts,
            "peers": [{"name": peer.name, "build": peer.build} for peer in self.peers],
            "limits_per_s": {name: figure_json(f) for name, f in limits.items()},
            "fair_share": {str(n): self.fair_share(n) for n in self.levels},
            "cases": [self._case_json(case, n) for n in self.levels for case in self.cases],
        }

    def _case_json(self, case: Case, busy: int) -> dict[str, Any]:
        sides = {}
        for side in self.sides:
            samples = self.found.of(side, busy, case)
            sides[side] = {
                "tokens_per_s": figure_json(Figure(tuple(samples))) if samples else None,
                "of_limit": self.of_limit(side, case) if busy == 0 else None,
                "of_quiet": optional_json(self.of_quiet(side, busy, case)) if busy else None,
            }
        ratios = {p.name: optional_json(self.ratio(p.name, busy, case)) for p in self.peers}
        return {"case": case.label, "busy_programs": busy, "sides": sides, "ratios": ratios}

    def as_text(self) -> str:
        facts, limits = self.opened.facts, self.opened.limits
        lines = [*heading(facts), *(f"{peer.name}: {peer.build}" for peer in self.peers)]
        lines += limit_lines(facts, limits)
        header = ["case"]
        for side in self.sides:
            header += [f"{side} t/s", "of limit", *([] if side == MARTLET else ["ratio", "range"])]
        lines += ["", *table(header, [self._quiet_row(case) for case in self.cases])]
        for busy in self.levels:
            if busy:
                lines += ["", *self._busy_lines(busy)]
        return "\n".join(lines)

    def _quiet_row(self, case: Case) -> list[str]:
        row = [case.label]
        for side in self.sides:
            samples = self.found.of(side, 0, case)
            row.append(significant(statistics.median(samples)) if samples else "-")
            row.append(percent(self.of_limit(side, case)))
            if side != MARTLET:
                row += list(ratio_cells(self.ratio(side, 0, case)))
        return row

    def _busy_lines(self, busy: int) -> list[str]:
        header = ["case", *(f"{side}, of its quiet" for side in self.sides)]
        header += [f"ratio to {peer.name}" for peer in self.peers]
        rows = []
        for case in self.cases:
            quiet = (self.of_quiet(side, busy, case) for side in self.sides)
            ratios = (self.ratio(peer.name, busy, case) for peer in self.peers)
            row = [case.label, *(percent(f.median if f else None) for f in quiet)]
            rows.append([*row, *(next(ratio_cells(ratio)) for ratio in ratios)])
        share = f"{self.fair_share(busy):.0%}"
        return [f"beside {busy} busy programs (fair share {share}):", *table(header, rows)]


def quotient(above: Sequence[float], below: Sequence[float]) -> Figure | None:
    """Sample by sample; None where a side has none."""
    pairs = list(zip(above, below, strict=False))
    return Figure(tuple(a / b for a, b in pairs)) if pairs else None


def optional_json(figure: Figure | None) -> dict[str, Any] | None:
    return figure_json(figure) if figure else None


def ratio_cells(figure: Figure | None) -> Iterator[str]:
    yield f"{figure.median:.2f}" if figure else "-"
    yield f"{figure.low:.2f} to {figure.high:.2f}" if figure else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
