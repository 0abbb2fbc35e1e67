"""What `martlet quantize` tells: each tensor before and after, and what rows forced upon it.
Owns wording and JSON; must not know how formats are chosen or anything is encoded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from martlet.quant.formats import FORMATS
from martlet.quant.quantize import TensorReport
from martlet.scripts.console import print_json


@dataclass(frozen=True)
class Replaced:
    """Tensors that have one format because their rows do not fill the blocks of another."""

    wanted: str
    format: str
    block: int  # of the wanted format, in weights
    n_tensors: int
    n_bytes: int
    wanted_bytes: int  # that the wanted format would have taken

    def told(self) -> str:
        more = self.n_bytes - self.wanted_bytes
        return (
            f"{self.n_tensors} tensors are {self.format} instead of {self.wanted}, as their rows "
            f"are no multiple of {self.block}: {more:+,} bytes"
        )


def replaced(reports: Sequence[TensorReport]) -> list[Replaced]:
    """By formats, in the order of the file."""
    groups: dict[tuple[str, str], list[TensorReport]] = defaultdict(list)
    for report in reports:
        if report.wanted is not None:
            groups[report.wanted, report.format].append(report)
    return [
        Replaced(
            wanted,
            made,
            FORMATS[wanted].block,
            len(group),
            sum(report.n_bytes for report in group),
            round(sum(r.n_weights for r in group) * FORMATS[wanted].bits_per_weight / 8),
        )
        for (wanted, made), group in groups.items()
    ]


def show(reports: Sequence[TensorReport], out: Path | None, how: str, as_json: bool) -> None:
    """`out` is None where nothing was written: errors are not known then."""
    total_bytes = sum(report.n_bytes for report in reports)
    n_weights = sum(report.n_weights for report in reports)
    summary: dict[str, Any] = {
        "type": how,
        "tensor_bytes": total_bytes,
        "bits_per_weight": round(8 * total_bytes / n_weights, 3),
        "file": str(out) if out else None,
        "file_bytes": out.stat().st_size if out else None,
    }
    fallbacks = replaced(reports)
    if as_json:
        told = [
            {
                "wanted": r.wanted,
                "to": r.format,
                "n_tensors": r.n_tensors,
                "bytes": r.n_bytes,
                "wanted_bytes": r.wanted_bytes,
            }
            for r in fallbacks
        ]
        tensors = [_as_json(report, has_errors=out is not None) for report in reports]
        print_json({**summary, "fallbacks": told, "tensors": tensors})
        return
    width = max(len(report.name) for report in reports)
    print(f"{'tensor':{width}}  {'from':>6}  {'to':>6}  {'bytes':>13}  {'bits/w':>6}  rel. RMSE")
    for report in reports:
        print(_line(report, width, has_errors=out is not None))
    size = f"{out}: {summary['file_bytes']:,} bytes, " if out else ""
    print(
        f"{size}{total_bytes:,} bytes of tensors, {summary['bits_per_weight']:.3f} bits per weight"
        f" ({how})"
    )
    for fallback in fallbacks:
        print(fallback.told())


def _as_json(r: TensorReport, *, has_errors: bool) -> dict[str, Any]:
    return {
        "name": r.name,
        "shape": list(r.shape),
        "from": r.source,
        "to": r.format,
        "wanted": r.wanted or r.format,
        "bytes": r.n_bytes,
        "bits_per_weight": round(8 * r.n_bytes / r.n_weights, 3),
        "relative_rmse": r.relative_rmse if has_errors else None,
    }


def _line(r: TensorReport, width: int, *, has_errors: bool) -> str:
    bits = 8 * r.n_bytes / r.n_weights
    lost = f"{r.relative_rmse:.5f}" if r.source != r.format and has_errors else ""
    instead = f"instead of {r.wanted}" if r.wanted else ""
    line = f"{r.name:{width}}  {r.source:>6}  {r.format:>6}  {r.n_bytes:>13,}  {bits:>6.3f}"
    return f"{line}  {lost:9}  {instead}".rstrip()
