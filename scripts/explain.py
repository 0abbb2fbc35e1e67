"""`martlet explain`: what binds MODEL on this machine, and what would change it.
Owns the options and what is put together; the calculations are explain_model.py's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import byte_progress, note, print_json
from martlet.scripts.models import find_model

if TYPE_CHECKING:
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime.plan import Plan
    from martlet.runtime.work import Speed
    from martlet.scripts.bench_cases import Case
    from martlet.scripts.bench_open import Options
    from martlet.scripts.explain_model import Subject
    from martlet.scripts.explain_record import Record
    from martlet.scripts.explain_report import Knee, Report

CONTEXTS, BATCHES, LONGEST = "512,4096", "1,2,4,8,16", 8192


def explain(
    model: options.ModelArgument,
    context: Annotated[
        str | None, typer.Option("-c", "--context", help=f"Contexts to decode at. [{CONTEXTS}]")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help=f"Sequences that decode together. [{BATCHES}]")
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    record: Annotated[
        Path | None,
        typer.Option(
            "--bench", exists=True, dir_okay=False, help="Show beside it what `bench --json` found."
        ),
    ] = None,
    int8: Annotated[float | None, typer.Option(min=0.001, help="GMAC/s; else measured.")] = None,
    f32: Annotated[float | None, typer.Option(min=0.001, help="GMAC/s; else measured.")] = None,
    read: Annotated[float | None, typer.Option(min=0.001, help="GB/s; else measured.")] = None,
    kv_type: options.KvTypeOption = options.KvTypeName.f16,
    threads: options.ThreadsOption = None,
    isa: Annotated[str | None, typer.Option(help="Kernels of the native executor.")] = None,
    step_rows: Annotated[int, typer.Option(min=1, help="Rows of one step at most.")] = 256,
    read_mb: Annotated[
        int | None, typer.Option(min=64, help="Buffer of the read limit, twice.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("-o", "--plot", help="Draw it: .svg, .png or .pdf.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """What memory and multiplying allow MODEL here, by batch and context; nothing is loaded."""
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime.ops import KvType
    from martlet.scripts import explain_plot, explain_report
    from martlet.scripts.bench import mega, whole_numbers
    from martlet.scripts.bench_open import Options
    from martlet.scripts.explain_model import Subject
    from martlet.scripts.explain_record import check_same_model, read_record
    from martlet.scripts.picture import check

    if picture:
        check(picture)
    found = read_record(record) if record else None
    # A record stands for itself; what is asked for besides comes along.
    is_asked = found is None or bool(context or batch)
    contexts = whole_numbers(context or CONTEXTS, "--context", 1) if is_asked else []
    batches = whole_numbers(batch or BATCHES, "--batch", 1)
    step_rows = found.step_rows if found else step_rows
    given = tuple(None if value is None else value * 1e9 for value in (int8, f32, read))
    with byte_progress() as progress:
        path = find_model(model, progress=progress)
    with GGUFFile.open(path) as file:
        plan, context_train = plan_of(file, step_rows)
        contexts = sorted({min(each, context_train) for each in contexts})
        cache = KvType[kv_type.value.upper()]
        limits = Options(threads=threads, isa=isa, buffer_bytes=mega(read_mb))
        speed, speed_from = speed_of(given, found, limits, weight_bytes(plan))
        subject = Subject(plan, cache, speed)
        if found:
            check_same_model(found, weight_bytes(plan))
        cases = cases_of(contexts, batches, prefill, found)
        longest = min(context_train, max(contexts, default=LONGEST))
        report = put_together(file, subject, cases, contexts, longest, prefill, found, speed_from)
    if picture:
        explain_plot.draw(picture, report, subject)
        note(f"drawn: {picture}")
    if as_json:
        print_json(explain_report.as_json(report))
    else:
        print(explain_report.as_text(report))


def plan_of(file: GGUFFile, step_rows: int) -> tuple[Plan, int]:
    """And the context that the model was made for. Raises MartletError for an encoder."""
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.models import record_plan
    from martlet.runtime.weights import StoredWeights

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes)
    if not config.is_causal:
        raise MartletError(
            f"{file.path.name} does not generate: it has neither a decode nor a cache to explain; "
            "`martlet bench` measures it"
        )
    return record_plan(config, StoredWeights(file.tensors), step_rows), config.context_train


def weight_bytes(plan: Plan) -> int:
    from martlet.runtime.work import step_work
    from martlet.scripts.explain_model import lay_out

    return step_work(plan, lay_out(1, 1, 0, 1)).weight_bytes


def speed_of(
    given: Sequence[float | None], record: Record | None, options: Options, span_bytes: int
) -> tuple[Speed, str]:
    """Each limit as it was given, else of the record, else measured now; and where from."""
    from martlet.runtime.work import Speed
    from martlet.scripts.limits import measure_speed

    if None not in given:
        return Speed(*(float(value or 0) for value in given)), "as given"
    if record and record.speed:
        known, source = record.speed, "of the record"
    else:
        note("measuring what this machine reads and multiplies: half a minute if it is idle")
        known, source = measure_speed(options, span_bytes), "measured now"
    found = (known.int8_macs, known.f32_macs, known.n_bytes)
    values = [theirs if mine is None else mine for mine, theirs in zip(given, found, strict=True)]
    some = any(value is not None for value in given)
    return Speed(*values), f"as given, the others {source}" if some else source


def cases_of(
    contexts: Sequence[int], batches: Sequence[int], prefill: int, record: Record | None
) -> list[Case]:
    from martlet.scripts.bench_cases import Case

    asked = [Case("decode", 1, c - 1, n) for c in contexts for n in batches]
    if contexts:
        asked.insert(0, Case("prefill", prefill))
    recorded = [each.case for each in record.cases] if record else []
    return list(dict.fromkeys([*recorded, *asked]))


def put_together(
    file: GGUFFile,
    subject: Subject,
    cases: Sequence[Case],
    contexts: Sequence[int],
    longest: int,
    prefill: int,
    record: Record | None,
    speed_from: str,
) -> Report:
    from martlet.scripts import explain_model
    from martlet.scripts.explain_report import Line, Report

    measured = [record.find(case) if record else None for case in cases]
    lines = [Line(subject.bound(c), m) for c, m in zip(cases, measured, strict=True)]
    knees = knees_of(subject, contexts, record)
    context = knees[0].context if knees else 1
    return Report(
        model=explain_model.facts_of(file, subject.plan),
        kv_type=subject.kv_type.name.lower(),
        step_rows=subject.plan.max_rows,
        speed=subject.speed,
        speed_from=speed_from,
        record=record,
        lines=lines,
        knees=knees,
        contexts=explain_model.contexts(subject, longest),
        variants=explain_model.variants(file, subject, context, prefill),
        guesses=explain_model.guesses(subject, context),
        context=context,
    )


def knees_of(subject: Subject, contexts: Sequence[int], record: Record | None) -> list[Knee]:
    """At the contexts asked for, and at those that decodes of the record had on average."""
    from martlet.scripts.explain_record import crossings
    from martlet.scripts.explain_report import Knee

    found = {}
    for each in crossings(record, subject) if record else ():
        assert record is not None
        n_tokens = record.decodes(each.depth)[0].case.n_tokens
        found[each.depth + (n_tokens + 1) // 2] = each
    return [Knee(c, subject.crossover(c), found.get(c)) for c in sorted({*contexts, *found})]


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["explain", *sys.argv[1:]])
