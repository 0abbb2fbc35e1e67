"""`martlet quality`: size, KL divergence and speed of a list of files, as a table and a plot.
Owns the command; figures come from quality_measure.py, words from quality_report.py, the picture
from quality_plot.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from martlet.scripts import options
from martlet.scripts.bench import tell
from martlet.scripts.console import chunk_progress, print_json


@options.with_load_options
def quality(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="GGUF files of one model.")],
    base: Annotated[str, typer.Option(help="What they are compared with, as in `kld`.")],
    file: options.TextOption,
    n_ctx: options.ChunkTokensOption = 512,
    n_chunks: options.ChunksOption = None,
    repeat: Annotated[
        int, typer.Option(min=0, help="Times that speed is measured; 0: not at all.")
    ] = 3,
    prefill: Annotated[int, typer.Option(min=1, help="Rows of the measured prefill.")] = 256,
    decode: Annotated[int, typer.Option(min=1, help="Steps of the measured decode.")] = 32,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write a plot: .svg, .png or .pdf.")
    ] = None,
    *,
    load: options.LoadOptions,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table in Markdown.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Size x KL divergence x speed of each FILE, and which of them no other beats."""
    from martlet.scripts import picture, quality_measure, quality_plot, quality_report
    from martlet.scripts.comparison import Text, compare
    from martlet.scripts.scored_text import read_text

    if out is not None:  # before minutes of measuring
        picture.check(out)
    text = Text(read_text(file), n_ctx, n_chunks)
    sizes = [quality_measure.size_of(spec) for spec in files]
    work = quality_measure.SpeedWork(prefill, decode, repeat)
    conditions = quality_measure.conditions(load, work)
    speeds = quality_measure.measure_speeds(files, work, load, tell) if repeat else None
    found = compare(base, files, text, load, chunk_progress)
    report = quality_report.Report.of(files, sizes, speeds, found, conditions, str(file))
    if as_json:
        print_json(report.as_json())
    elif markdown:
        print(report.as_markdown())
    else:
        report.show()
    if out is not None:  # last: what was measured is told even if it cannot be drawn
        quality_plot.draw(out, report)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["quality", *sys.argv[1:]])
