"""`martlet serve`: a model behind the local HTTP API, and a line to try it with.
Owns the options, the warnings and what is printed; the server itself is martlet.server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.configuration import ConfigurationOption
from martlet.scripts.console import note
from martlet.scripts.exposure import check_exposure, read_keys
from martlet.scripts.generate import check_draft
from martlet.scripts.serve_many import models_of, places
from martlet.scripts.telemetry import open_spans

if TYPE_CHECKING:
    from martlet.runtime.model import Model
    from martlet.runtime.prefix_store import PrefixStore
    from martlet.runtime.work import Speed
    from martlet.server import ServerOptions
    from martlet.server.lifecycle import Lifecycle


class MetricsNames(str, Enum):
    martlet = "martlet"
    vllm = "vllm"


ROUTES = {True: "/v1/chat/completions", False: "/v1/completions"}  # has a chat template


@options.with_load_options
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL…", help="Known names, hf:ORG/REPO/FILE.gguf or paths. Requests pick one."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    name: Annotated[str | None, typer.Option(help="The name requests call it by.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Asked of clients; may be repeated.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="More keys, one per line.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on the network without a key.")
    ] = False,
    origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may call; may be repeated.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that requests may carry, * for any; may be repeated."),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Waiting requests before 503.")] = 64,
    max_body: Annotated[
        int, typer.Option(parser=options.parse_bytes, metavar="SIZE", help="Larger ones get 413.")
    ] = "16M",  # type: ignore[assignment]
    max_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Longest time of a request. Default: any.")
    ] = None,
    max_per_client: Annotated[
        int, typer.Option(min=0, help="Requests of a key or address at a time; 0: any number.")
    ] = 0,
    ping_seconds: Annotated[
        float, typer.Option(min=0, help="Between signs of life in silent streams; 0: none.")
    ] = 15.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="What running answers get when the server is stopped.")
    ] = 30.0,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A JSON line on stderr for each request.")
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="The same, with what was asked.")
    ] = False,
    metrics_names: Annotated[
        MetricsNames, typer.Option(help="vllm: /metrics has the figures under its names, too.")
    ] = MetricsNames.martlet,
    models_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Offer its .gguf files too.")
    ] = None,
    keep_alive: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Unload a model that long without requests."),
    ] = None,
    max_memory: Annotated[
        int | None,
        typer.Option(
            parser=options.parse_bytes, metavar="SIZE", help="For all models; idle ones make room."
        ),
    ] = None,
    *,
    load: options.LoadOptions,
    context: options.ContextOption = None,
    kv_bytes: options.KvBytesOption = None,
    lora: options.LoraOption = None,
    speculate: options.SpeculateOption = "auto",
    speculate_rule: options.SpeculateRuleOption = options.SpeculateRule.match,
    draft: options.DraftOption = None,
    draft_vocab: options.DraftVocabOption = None,
    prefix_cache_dir: options.PrefixFolderOption = None,
    prefix_cache_bytes: options.PrefixBytesOption = "1G",  # type: ignore[assignment]
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Time a step is kept near. Default: twice what its streams take without prompts.",
        ),
    ] = None,
    trace: options.TraceOption = None,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Send spans of requests by OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT says.",
        ),
    ] = False,
    limits: Annotated[
        bool,
        typer.Option(
            "--limits",
            help="Measure first what this machine can do at best, to tell what binds: a second.",
        ),
    ] = False,
    config: ConfigurationOption = None,
) -> None:
    """Answer OpenAI-style requests with MODEL until Ctrl-C. See docs/serving.md."""
    from martlet.scripts.tracing import open_trace
    from martlet.server import ServerOptions
    from martlet.server.options import LOOPBACK_NAMES
    from martlet.server.run import open_socket

    models = models_of(model or (), models_dir)
    is_shelf = len(models) > 1 or keep_alive is not None or max_memory is not None
    if name and len(models) > 1:
        raise MartletError("--name is for one model; several are called by their files' names")
    if name:
        models = dict.fromkeys([name], *models.values())
    keys = (*(api_key or ()), *read_keys(api_key_file))
    check_exposure(host, has_key=bool(keys), is_insecure=insecure)
    for option, given in (("--lora", lora), ("--draft", draft), ("--draft-vocab", draft_vocab)):
        if given and is_shelf:
            raise MartletError(f"{option} is for one model that stays; serve this one by itself")
    check_draft(draft, speculate, draft_vocab)
    arguments = load.arguments(context=context, kv_bytes=kv_bytes, lora=lora, speculate=speculate)
    served = ServerOptions(
        api_keys=keys,
        origins=tuple(origin or ()),
        hosts=tuple(allow_host or LOOPBACK_NAMES),
        max_body_bytes=max_body,
        max_request_s=max_seconds,
        max_per_client=max_per_client,
        ping_s=ping_seconds,
        drain_s=drain_seconds,
        log=log_record if log_requests or log_prompts else None,
        log_prompts=log_prompts,
        vllm_names=metrics_names is MetricsNames.vllm,
    )
    engine: dict[str, Any] = {
        "max_queue": max_queue,
        "step_ms": step_ms,
        "speculate": speculate,
        "speculate_rule": speculate_rule.value,
    }
    prefixes = (prefix_cache_dir, prefix_cache_bytes)
    if prefix_cache_dir:
        check_can_save(load.executor.value)
    # The address first: whether it can be had is known long before a model is loaded.
    with (
        open_socket(host, port) as listener,
        open_trace(trace) as written,
        open_spans(otel) as spans,
    ):
        served = replace(served, spans=spans)
        arguments["trace"] = written
        if limits:
            engine["limits"] = measured_limits(load)
        place: dict[str, Any] = {"host": host, "listener": listener, "options": served}
        if is_shelf:
            kept = {"keep_alive_s": keep_alive, "max_bytes": max_memory}
            serve_several(models, arguments, engine, prefixes, kept, place)
        else:
            serve_one(models, arguments, engine, prefixes, place, (draft, speculate, draft_vocab))


def serve_one(
    models: dict[str, str],
    arguments: dict[str, Any],
    engine: dict[str, Any],
    prefixes: tuple[Path | None, int],
    place: dict[str, Any],
    guesses: tuple[str | None, str, str | None],
) -> None:
    from martlet.scripts.generate import open_drafter, open_model
    from martlet.server import serve as serve_http

    ((called, spec),) = models.items()
    options = place["options"]
    with open_model(spec, **arguments) as opened, open_drafter(opened, *guesses) as drafter:
        serve_http(
            opened,
            drafter=drafter,
            model_name=called,
            prefix_store=open_store(opened, *prefixes),
            on_ready=lambda url: announce(opened, called, url, needs_key=bool(options.api_keys)),
            on_drain=stopping(options),
            **engine,
            **place,
        )


def serve_several(
    models: dict[str, str],
    arguments: dict[str, Any],
    engine: dict[str, Any],
    prefixes: tuple[Path | None, int],
    kept: dict[str, Any],
    place: dict[str, Any],
) -> None:
    from martlet.server.run import hold, serve_shelf
    from martlet.server.shelf import Loaded, Shelf

    options, (folder, max_bytes) = place["options"], prefixes

    def held(model: Model, name: str, lifecycle: Lifecycle) -> Loaded:
        store = open_store(model, folder / name if folder else None, max_bytes)
        terms = {"options": options, "lifecycle": lifecycle, "prefix_store": store}
        return hold(model, model_name=name, **terms, **engine)

    offered = places(models, arguments, held, measures=kept["max_bytes"] is not None)

    def ready(url: str) -> None:
        note(f"{', '.join(models)} at {url}/v1, loaded when asked for; a page to chat at {url}/")
        print(curl_line(next(iter(models)), url, True, bool(options.api_keys)), flush=True)

    serve_shelf(Shelf(offered, **kept), on_ready=ready, on_drain=stopping(options), **place)


def measured_limits(load: options.LoadOptions) -> Speed:
    from martlet.scripts.bench_open import Options
    from martlet.scripts.limits import measure_speed

    speed = measure_speed(Options(threads=load.threads))
    int8, read = speed.int8_macs / 1e9, speed.n_bytes / 1e9
    note(f"limits of this machine: int8 {int8:.0f} GMAC/s, read {read:.1f} GB/s")
    return speed


def stopping(options: ServerOptions) -> Callable[[int], None]:
    limit_s = options.drain_s
    return lambda n: note(
        f"stopping: {n} unfinished, for {limit_s:g} s at most; Ctrl-C again ends them"
    )


def log_record(record: dict[str, Any]) -> None:
    note(json.dumps(record))


def check_can_save(executor: str) -> None:
    """Before a model is loaded or a folder made. Raises UnsupportedError."""
    from martlet.runtime.executors.choice import likely_executor
    from martlet.runtime.prefix_store import check_saves

    check_saves(*likely_executor(executor))


def open_store(model: Model, folder: Path | None, max_bytes: int) -> PrefixStore | None:
    """Where computed prompts outlive the process; only a folder that was asked for is written."""
    if folder is None:
        return None
    from martlet.runtime.fingerprint import fingerprint
    from martlet.runtime.prefix_store import PrefixStore, check_saves

    check_saves(model.executor, model.executor.name, model.executor_reason)
    store = PrefixStore(folder, fingerprint(model), max_bytes=max_bytes)
    note(f"prefix cache {folder}: {store.n_bytes / 1e6:,.0f} of {max_bytes / 1e6:,.0f} MB")
    return store


def announce(model: Model, name: str, url: str, *, needs_key: bool) -> None:
    """The curl line goes to stdout, alone, so that a program can read it."""
    note(f"{name} at {url}/v1, {model.context} tokens of context; a page to chat at {url}/")
    note(f"executor {model.executor_reason}")
    pool_tokens = model.executor.n_blocks * model.executor.block_tokens
    note(f"keys and values {model.kv_bytes / 1e6:,.0f} MB for {pool_tokens} tokens (--kv-bytes)")
    if sys.stdout.isatty():
        note("try it, in another terminal (Ctrl-C here stops the server):")
    print(curl_line(name, url, model.tokenizer.chat_template is not None, needs_key), flush=True)


def curl_line(name: str, url: str, has_template: bool, needs_key: bool) -> str:
    body: dict[str, object] = {"model": name, "stream": True, "max_tokens": 64, "temperature": 0.7}
    if has_template:
        body["messages"] = [{"role": "user", "content": "Tell me a short story about a bird."}]
    else:
        body["prompt"] = "The capital of France is"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    data = json.dumps(body)
    route = ROUTES[has_template]
    return f"curl -N {url}{route}{key} -H 'Content-Type: application/json' -d '{data}'"


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["serve", *sys.argv[1:]])
