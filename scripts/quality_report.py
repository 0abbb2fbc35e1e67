"""The report of `martlet quality`: one row per file, and which files no other beats.
Owns headings, wording and the three forms (table, Markdown, JSON); must not measure anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from martlet.scripts.bench_measure import Figure
from martlet.scripts.comparison import Comparison
from martlet.scripts.console import plain_console
from martlet.scripts.kld_report import (
    ERRORS,
    arithmetic,
    estimate_text,
    measured,
    named,
    precision,
    scope,
)
from martlet.scripts.logit_stats import Divergence
from martlet.scripts.quality_measure import Size, Speed

CALCULATED = (
    "bits per weight (8 x bytes of the whole file / numbers in its tensors, a tied head once), the"
    " error bars, and which files are efficient: no other has both fewer or equal bytes and a"
    " lower or equal mean KL"
)


@dataclass(frozen=True)
class Row:
    name: str
    size: Size
    divergence: Divergence
    speed: Speed | None
    is_efficient: bool


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    comparison: Comparison
    conditions: dict[str, Any]
    text: str

    @classmethod
    def of(
        cls,
        files: Sequence[str],
        sizes: Sequence[Size],
        speeds: Sequence[Speed] | None,
        found: Comparison,
        conditions: dict[str, Any],
        text: str,
    ) -> Report:
        results = [Divergence.of(scores) for scores in found.scores]
        points = [(s.file_bytes, r.mean_kl.value) for s, r in zip(sizes, results, strict=True)]
        best = efficient(points)
        names = short_names(files)
        given: Sequence[Speed | None] = speeds or [None] * len(names)
        rows = [Row(*each) for each in zip(names, sizes, results, given, best, strict=True)]
        return cls(rows, found, conditions, text)

    @property
    def has_speed(self) -> bool:
        return self.conditions["repeat"] > 0

    def explanations(self) -> dict[str, str]:
        """What is measured and what is calculated, and how."""
        found, c = self.comparison, self.conditions
        scored = scope(self.rows[0].divergence, found.n_ctx)
        by = arithmetic(found.tests[0])
        told = {
            "base": named(found.base),
            "measured, divergence": f"{measured(found)}; {scored}, {self.text}; {precision(found)}",
            "measured, size": "bytes of the file",
            "calculated": CALCULATED,
            "errors": ERRORS,
        }
        if self.has_speed:
            told["measured, speed"] = (
                f"tokens/s, median of {c['repeat']} (range), files in turn: prefill of"
                f" {c['prefill_rows']} rows, {c['decode_steps']} single rows; {by}, {c['threads']}"
                f" threads on {c['cpu']}, load average {c['load_average']:.1f} at the start"
            )
        return told

    def table(self) -> dict[str, list[str]]:
        """Cells by heading."""
        columns = {**COLUMNS, **(SPEED_COLUMNS if self.has_speed else {}), **LAST_COLUMNS}
        return {heading: [cell(row) for row in self.rows] for heading, cell in columns.items()}

    def as_markdown(self) -> str:
        columns = self.table()
        lines = [
            "| " + " | ".join(columns) + " |",
            "|---" + "|---:" * (len(columns) - 2) + "|---|",
        ]
        for cells in zip(*columns.values(), strict=True):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        notes = (f"- {name}: {told}" for name, told in self.explanations().items())
        return "\n".join([*lines, "", *notes])

    def show(self) -> None:
        from rich.table import Table

        console = plain_console()
        columns = self.table()
        first, *others = columns
        table = Table(first, box=None, pad_edge=False)
        for heading in others:
            table.add_column(heading, justify="right")
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        console.print(table)
        console.print()
        for name, told in self.explanations().items():
            console.print(f"{name}: {told}")

    def as_json(self) -> dict[str, Any]:
        files = []
        for facts, row in zip(self.comparison.tests, self.rows, strict=True):
            speed = row.speed and {
                name: {"median": figure.median, "samples": figure.samples}
                for name, figure in (
                    ("prefill_tokens_per_s", row.speed.prefill),
                    ("decode_tokens_per_s", row.speed.decode),
                )
            }
            size = {**asdict(row.size), "bits_per_weight": row.size.bits_per_weight}
            files.append(
                {
                    "name": row.name,
                    **facts,
                    **size,
                    "divergence": asdict(row.divergence),
                    "speed": speed,
                    "efficient": row.is_efficient,
                }
            )
        return {
            "base": self.comparison.base,
            "file": self.text,
            "n_ctx": self.comparison.n_ctx,
            "conditions": self.conditions,
            "explanations": self.explanations(),
            "files": files,
        }


def efficient(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (size, loss): no other point is at most as large and loses at most as much, and is
    better in one of the two."""
    return [
        not any(a <= size and b <= loss and (a, b) != (size, loss) for a, b in points)
        for size, loss in points
    ]


def short_names(files: Sequence[str]) -> list[str]:
    """The stems of the files, or the files as given where two stems are alike."""
    stems = [Path(file).stem if file.endswith(".gguf") else file for file in files]
    return stems if len(set(stems)) == len(stems) else list(files)


def figure_text(figure: Figure) -> str:
    return f"{figure.median:,.0f} ({figure.low:,.0f} to {figure.high:,.0f})"


Column = Callable[[Row], str]
COLUMNS: dict[str, Column] = {
    "file": lambda row: row.name,
    "bytes": lambda row: f"{row.size.file_bytes:,}",
    "bits/weight": lambda row: f"{row.size.bits_per_weight:.3f}",
    "mean KL": lambda row: estimate_text(row.divergence.mean_kl, 5),
    "99 %": lambda row: f"{row.divergence.quantiles_kl['p99']:.4f}",
    "same top": lambda row: estimate_text(row.divergence.same_top, 1, 100, " %"),
    "ln PPL ratio": lambda row: estimate_text(row.divergence.ln_perplexity_ratio, 4),
}
SPEED_COLUMNS: dict[str, Column] = {
    "prefill tokens/s": lambda row: figure_text(row.speed.prefill) if row.speed else "-",
    "decode tokens/s": lambda row: figure_text(row.speed.decode) if row.speed else "-",
}
LAST_COLUMNS: dict[str, Column] = {
    "efficient": lambda row: "yes" if row.is_efficient else "",
}
