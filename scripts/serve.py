"""`martlet serve`: a model behind the local HTTP API, and a line to try it with.
Owns the options, the warnings and what is printed; the server itself is martlet.server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.catalogue import CATALOGUE
from martlet.scripts.configuration import ConfigurationOption
from martlet.scripts.console import note

if TYPE_CHECKING:
    from martlet.runtime.model import Model
    from martlet.runtime.prefix_store import PrefixStore

ROUTES = {True: "/v1/chat/completions", False: "/v1/completions"}  # has a chat template


@options.with_load_options
def serve(
    model: options.ModelArgument,
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
    *,
    load: options.LoadOptions,
    context: options.ContextOption = None,
    kv_bytes: options.KvBytesOption = None,
    prefix_cache_dir: options.PrefixFolderOption = None,
    prefix_cache_bytes: options.PrefixBytesOption = "1G",  # type: ignore[assignment]
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Time a step is kept near. Default: twice what its streams take without prompts.",
        ),
    ] = None,
    config: ConfigurationOption = None,
) -> None:
    """Answer OpenAI-style requests with MODEL until Ctrl-C. See docs/serving.md."""
    from martlet.scripts.generate import open_model
    from martlet.server import ServerOptions
    from martlet.server import serve as serve_http
    from martlet.server.options import LOOPBACK_NAMES
    from martlet.server.run import open_socket

    keys = (*(api_key or ()), *read_keys(api_key_file))
    check_exposure(host, has_key=bool(keys), is_insecure=insecure)
    called = name or served_name(model)
    arguments = load.arguments(context=context, kv_bytes=kv_bytes)
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
    )
    # The address first: whether it can be had is known long before the model is loaded.
    with open_socket(host, port) as listener, open_model(model, **arguments) as opened:
        serve_http(
            opened,
            model_name=called,
            host=host,
            max_queue=max_queue,
            step_ms=step_ms,
            prefix_store=open_store(opened, prefix_cache_dir, prefix_cache_bytes),
            options=served,
            listener=listener,
            on_ready=lambda url: announce(opened, called, url, needs_key=bool(keys)),
            on_drain=lambda n: note(
                f"stopping: {n} unfinished, for {drain_seconds:g} s at most; Ctrl-C again ends them"
            ),
        )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """One per line; empty lines and those that begin with # are none."""
    if path is None:
        return ()
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise MartletError(f"{path} holds no key; write one per line")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        note(f"warning: others on this machine may read {path}; chmod 600 mends that")
    return keys


def check_exposure(host: str, *, has_key: bool, is_insecure: bool) -> None:
    from martlet.server.options import is_loopback

    if is_loopback(host) or has_key:
        return
    if not is_insecure:
        raise MartletError(
            f"{host} is open to the network and asks for no key; add --api-key or --api-key-file, "
            "or --insecure to let anybody in"
        )
    note(f"warning: {host} is open to the network and asks for no key (--insecure)")


def log_record(record: dict[str, Any]) -> None:
    note(json.dumps(record))


def open_store(model: Model, folder: Path | None, max_bytes: int) -> PrefixStore | None:
    """Where computed prompts outlive the process; only a folder that was asked for is written."""
    if folder is None:
        return None
    from martlet.runtime.fingerprint import fingerprint
    from martlet.runtime.prefix_store import PrefixStore

    store = PrefixStore(folder, fingerprint(model), max_bytes=max_bytes)
    note(f"prefix cache {folder}: {store.n_bytes / 1e6:,.0f} of {max_bytes / 1e6:,.0f} MB")
    return store


def served_name(spec: str) -> str:
    return spec if spec in CATALOGUE else Path(spec.rsplit(":", 1)[-1]).stem


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
