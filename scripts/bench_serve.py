"""`martlet bench-serve`: a load on servers, in turns, and what each of their clients had of it.
Owns the command line: what its words mean. The rest is in load_session.py."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import note, print_json

if TYPE_CHECKING:
    from martlet.scripts.load_workload import Load
    from martlet.scripts.records import Record

FIGURES = {"ttft", "tpot", "amortised_tpot", "end_to_end", "itl", "step_gap"}


class EndpointName(str, Enum):
    completions = "completions"
    chat = "chat"


class CacheName(str, Enum):
    cold = "cold"
    warm = "warm"


def bench_serve(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL|MODEL]...",
            help="Servers that run (http://…), or models that `martlet serve` serves meanwhile.",
        ),
    ] = None,
    direct: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also an engine without HTTP, in turns.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=COMMAND",
            help="Also a server started so; {model}, {port}, {threads}, {streams} are filled in.",
        ),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: so many streams, as 1,4,8. Default: 1.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: requests per second, as 0.5,1,2.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Of an open loop: 1 is Poisson, below it bursts.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON lines: when, prompt, output tokens."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("-n", "--requests", min=1, help="A run. Default: 4 per stream.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Tokens: 100, 50-200 or 100~30.")] = "100",
    output: Annotated[str, typer.Option(help="Tokens, likewise; their end is ignored.")] = "64",
    prefix: Annotated[int, typer.Option(min=0, help="Shared tokens before each prompt.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="How many different ones.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = 1,
    cache: Annotated[
        CacheName, typer.Option(help="cold: new prompts in each run; warm: each was sent before.")
    ] = CacheName.cold,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="Requests before all. Default: one per stream.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")] = 3,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE:MS", help="ttft:1000, tpot:100 …; may be repeated."),
    ] = None,
    endpoint: EndpointName = EndpointName.completions,
    stream: Annotated[bool, typer.Option(help="Whether answers are streamed.")] = True,
    token_counts: Annotated[
        bool, typer.Option(help="Ask for the tokens of each piece (continuous_usage_stats).")
    ] = False,
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Further fields of each request.")
    ] = '{"ignore_eos": true}',
    name: Annotated[str | None, typer.Option(help="The model's name in requests.")] = None,
    key: Annotated[str | None, typer.Option(envvar="MARTLET_API_KEY")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The GGUF file that a URL serves."),
    ] = None,
    threads: options.ThreadsOption = None,
    kv_type: options.KvTypeOption = options.KvTypeName.f16,
    context: options.ContextOption = None,
    speculate: Annotated[str, typer.Option(metavar="auto|off|N")] = "off",
    condition: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What a URL does not tell, as threads=2."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of one request.")] = 600.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of prompts and arrivals.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Keep the records, with every request.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A report with plots, in one file.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Latency and throughput of servers under a load. See docs/benchmarks.md."""
    from martlet.scripts.load_session import Asked, measure, with_loop
    from martlet.scripts.load_sides import Manner
    from martlet.scripts.load_workload import Lengths, Shape

    asked = Asked(
        targets or [],
        direct,
        [pair(each, "--run") for each in run or ()],
        loads_of(concurrency, rate, burstiness, trace),
        Shape(Lengths.parse(prompt), Lengths.parse(output), prefix, prefixes, turns),
        requests,
        cache.value,
        warm_up,
        repeat,
        objectives_of(goodput or (), stream),
        timeout,
        secrets.randbits(32) if seed is None else seed,
    )
    if not (asked.targets or direct or asked.commands):
        raise typer.BadParameter("say whom to ask: an address, a model, --direct or --run")
    if direct and endpoint is not EndpointName.completions:
        raise MartletError("--direct has no chat template; leave out --endpoint chat")
    if direct and not stream:
        raise MartletError("--direct is always a stream; leave out --no-stream")
    for path in (out, html):  # known before anything is measured
        if path and not path.absolute().parent.is_dir():
            raise MartletError(f"{path}: there is no folder {path.absolute().parent}")
    fields = json_object(extra)
    if token_counts:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    manner = Manner(
        endpoint.value,
        stream,
        name,
        key,
        fields,
        threads,
        kv_type.value,
        file,
        dict(pair(each, "--condition") for each in condition or ()),
        speculate,
        context,
    )
    records = with_loop(measure(asked, manner))
    tell(records, out, html, as_json)


def loads_of(
    concurrency: str | None, rate: str | None, burstiness: float, trace: Path | None
) -> list[Load]:
    from martlet.scripts.bench import whole_numbers
    from martlet.scripts.load_workload import Load, read_trace

    given = {"--concurrency": concurrency, "--rate": rate, "--trace": trace}
    if sum(value is not None for value in given.values()) > 1:
        raise typer.BadParameter(f"only one of {', '.join(given)} at a time")
    if trace:
        return [Load(trace=read_trace(trace), trace_name=trace.name)]
    if rate is None:
        return [Load(n_streams=n) for n in whole_numbers(concurrency or "1", "--concurrency", 1)]
    try:
        rates = [float(part) for part in rate.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < each < 1e6 for each in rates):
        raise typer.BadParameter(f"--rate is {rate!r}, expected numbers above 0 as in 0.5,1,2.")
    return [Load(rate_per_s=each, burstiness=burstiness) for each in rates]


def objectives_of(given: Sequence[str], is_stream: bool) -> dict[str, float]:
    objectives = {}
    for text in given:
        name, _, most = text.partition(":")
        try:
            objectives[f"{name}_ms"] = float(most)
        except ValueError:
            name = ""
        if name not in FIGURES:
            known = ", ".join(sorted(FIGURES))
            raise typer.BadParameter(f"--goodput is {text!r}, expected FIGURE:MS of {known}.")
        if not is_stream and name not in ("end_to_end", "amortised_tpot"):
            raise typer.BadParameter(f"--goodput {name} cannot be seen with --no-stream.")
    return objectives


def pair(text: str, option: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not (name and is_there and value):
        raise typer.BadParameter(f"{option} is {text!r}, expected NAME=VALUE.")
    return name, value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--extra is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra is no JSON object.")
    return value


def tell(records: Sequence[Record], out: Path | None, html: Path | None, as_json: bool) -> None:
    from martlet.scripts import load_report
    from martlet.scripts import records as files

    if out:
        files.write_records(out, records)
        note(f"records: {out}")
    if html:
        from martlet.scripts.load_html import page

        html.write_text(page(records), encoding="utf-8")
        note(f"report: {html}")
    if as_json:
        print_json(files.as_json(records))
    else:
        print(load_report.as_text(records))


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-serve", *sys.argv[1:]])
