"""`martlet quantize`: a GGUF file in other formats, with an account of what was lost.
Owns the options; formats are chosen in quant.mixtures, written in quant.quantize, the report is
quantize_report.py's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.quant.errors import FileFormatError
from martlet.scripts import options
from martlet.scripts.console import byte_progress, note

if TYPE_CHECKING:
    from martlet.quant.gguf_field import Field
    from martlet.quant.gguf_file import GGUFFile
    from martlet.quant.imatrix import Imatrix
    from martlet.quant.mixtures import Overrides, Preset
    from martlet.quant.quantize import Plan, TensorReport
    from martlet.scripts.calibrated_plan import Budget, Text


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN.gguf", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf")],
    type_: Annotated[
        str | None,
        typer.Option("--type", help="A preset of llama.cpp: Q4_K_M, Q4_0, IQ4_XS, F16 …"),
    ] = None,
    pure: Annotated[bool, typer.Option(help="Every matrix the same format, no mixture.")] = False,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=FORMAT",
            help="Tensors whose name matches take this format; the first that matches counts.",
        ),
    ] = None,
    output_tensor_type: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Of the output projection.")
    ] = None,
    token_embedding_type: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Of the token embedding.")
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Importance of channels, from llama.cpp."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="UTF-8 text to run through the model: rounding is fitted to what products read.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With --calibrate: of the file, as 4.2M or '95%-of Q4_K_M'."
        ),
    ] = None,
    bpw: Annotated[
        float | None,
        typer.Option(min=0.1, help="With --calibrate: bits per weight, all tensors together."),
    ] = None,
    n_ctx: Annotated[
        int, typer.Option("-c", "--context", min=4, help="Tokens per chunk of that text.")
    ] = 512,
    n_tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Of that text, spread over all of it.")
    ] = 32768,
    threads: options.ThreadsOption = None,
    dry_run: Annotated[
        bool, typer.Option(help="Show what would be written, and its size.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write OUT.gguf: the model IN.gguf with its matrices in other formats."""
    from martlet.quant.gguf_file import GGUFFile
    from martlet.quant.imatrix import read_imatrix
    from martlet.quant.mixtures import Overrides, find_preset
    from martlet.quant.quantize import check_plan, quantize_file
    from martlet.scripts.calibrated_plan import Text
    from martlet.scripts.quantize_report import show
    from martlet.scripts.scored_text import read_text
    from threadpoolctl import threadpool_limits

    check_options(type_, calibrate, size, bpw)
    preset = None if type_ is None else find_preset(type_)
    overrides = Overrides(
        patterns=parse_patterns(tensor_type or []),
        output=output_tensor_type and known_format(output_tensor_type),
        embedding=token_embedding_type and known_format(token_embedding_type),
        is_pure=pure,
    )
    importance = None if imatrix is None else read_imatrix(imatrix)
    # Matrices go to threads of our own; BLAS with threads besides would wait for them, busily.
    with GGUFFile.open(source) as file, threadpool_limits(1, user_api="blas"):
        if out.exists() and any(out.samefile(part) for part in file.paths):
            raise typer.BadParameter("OUT.gguf is IN.gguf or a shard of it; name another file")
        if calibrate is not None:
            text = Text(read_text(calibrate), n_ctx, n_tokens)
            plan = calibrated(file, text, budget_of(size, bpw), type_, threads)
        else:
            assert preset is not None, "check_options"
            plan = make_plan(file, preset, overrides, importance, imatrix)
        check_plan(file, plan)
        warn_of_requantizing(file, plan)
        if dry_run:
            reports = planned(file, plan)
        else:
            total_bytes = sum(report.n_bytes for report in planned(file, plan))
            with byte_progress() as progress:
                done_bytes = 0

                def written(report: TensorReport) -> None:
                    nonlocal done_bytes
                    done_bytes += report.n_bytes
                    progress(f"{report.name} {report.format}", done_bytes, total_bytes)

                reports = quantize_file(file, out, plan, threads=threads, on_tensor=written)
    show(reports, None if dry_run else out, preset.name if preset else "calibrated", as_json)


def check_options(
    type_: str | None, calibrate: Path | None, size: str | None, bpw: float | None
) -> None:
    """Exactly one of the three says how large the file becomes."""
    given = [name for name, v in (("--type", type_), ("--size", size), ("--bpw", bpw)) if v]
    if len(given) != 1:
        raise typer.BadParameter(
            f"one of --type, --size and --bpw is needed, given: {', '.join(given) or 'none'}"
        )
    if calibrate is None and type_ is None:
        raise typer.BadParameter(f"{given[0]} chooses formats by what a text says: add --calibrate")


def budget_of(size: str | None, bpw: float | None) -> Budget | None:
    from martlet.scripts.calibrated_plan import Budget

    if size is not None:
        return Budget.parse(size)
    return None if bpw is None else Budget(bits_per_weight=bpw)


def calibrated(
    file: GGUFFile, text: Text, budget: Budget | None, type_: str | None, threads: int | None
) -> Plan:
    from martlet.scripts.calibrated_plan import calibrated_plan, observed, unread
    from martlet.scripts.console import stage_progress

    with stage_progress() as progress:
        with_prices = budget is not None
        seen = observed(file, text, with_prices=with_prices, threads=threads, progress=progress)
    if names := unread(file, seen):
        what = "rounded without the text" if budget is None else "left as they are"
        note(f"{what}, as no product reads them: {', '.join(names)}")
    if unmet := sum(int((stack.inputs.n_rows == 0).sum()) for stack in seen.stacks):
        note(f"{unmet} experts' matrices met none of the text: rounded by what the others met")
    return calibrated_plan(file, seen, budget, type_, threads=threads)


def parse_patterns(given: Sequence[str]) -> list[tuple[str, str]]:
    import re

    patterns = []
    for text in given:
        pattern, equals, format_name = text.rpartition("=")
        if not equals or not pattern:
            raise typer.BadParameter(f"{text!r} is not REGEX=FORMAT, as in 'attn_v=Q8_0'")
        try:
            re.compile(pattern)
        except re.error as error:
            raise typer.BadParameter(f"{pattern!r} is no regular expression: {error}") from None
        patterns.append((pattern, known_format(format_name)))
    return patterns


def known_format(text: str) -> str:
    from martlet.quant.encode import ENCODABLE

    if text.upper() not in ENCODABLE:
        raise typer.BadParameter(f"no format is called {text!r}; there are {', '.join(ENCODABLE)}")
    return text.upper()


def make_plan(
    file: GGUFFile,
    preset: Preset,
    overrides: Overrides,
    imatrix: Imatrix | None,
    imatrix_path: Path | None,
) -> Plan:
    from martlet.quant.mixtures import choices
    from martlet.quant.quantize import Plan

    shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    has_imatrix = imatrix is not None
    chosen = choices(preset, file.metadata, shapes, has_imatrix=has_imatrix, overrides=overrides)
    if imatrix is None or imatrix_path is None:
        return Plan.of(chosen, preset.file_type)
    importance = {k: v for k, v in imatrix.importance.items() if k in shapes}
    if not importance:
        example = next(iter(imatrix.importance))
        raise FileFormatError(
            f"{imatrix_path}: names no tensor of {file.path} (it has {example!r}); it was made for"
            " another model"
        )
    fields = imatrix_fields(imatrix, imatrix_path)
    return Plan.of(chosen, preset.file_type, importance=importance, fields=fields)


def imatrix_fields(imatrix: Imatrix, path: Path) -> dict[str, Field]:
    """What llama-quantize notes of the imatrix; the file's name without its folder."""
    from martlet.quant.gguf_field import Field

    values = {
        "quantize.imatrix.file": path.name,
        "quantize.imatrix.dataset": imatrix.datasets[0] if imatrix.datasets else "",
        "quantize.imatrix.entries_count": len(imatrix.importance),
        "quantize.imatrix.chunks_count": imatrix.n_chunks,
    }
    return {key: Field.of(value) for key, value in values.items()}


def planned(file: GGUFFile, plan: Plan) -> list[TensorReport]:
    """The report before anything was encoded: sizes are exact, errors are unknown (0)."""
    from martlet.quant.quantize import TensorReport

    return [TensorReport.of(tensor, plan, 0.0) for tensor in file.tensors.values()]


def warn_of_requantizing(file: GGUFFile, plan: Plan) -> None:
    again = [report for report in planned(file, plan) if report.is_requantized]
    if again:
        formats = ", ".join(sorted({report.source for report in again}))
        note(
            f"WARNING: {len(again)} tensors of {file.path} are quantized already ({formats}): the"
            " losses add up. Quantize the original (F32, F16, BF16) where you can get it."
        )


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["quantize", *sys.argv[1:]])
