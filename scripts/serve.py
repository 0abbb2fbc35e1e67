"""`martlet serve`: a model behind the local HTTP API, and a line to try it with.
Owns the options, the warnings and what is printed; the server itself is martlet.server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.catalogue import CATALOGUE
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
        list[str] | None,
        typer.Option(envvar="MARTLET_API_KEY", help="Asked of clients; may be repeated."),
    ] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may call; may be repeated.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Waiting requests before 503.")] = 64,
    *,
    load: options.LoadOptions,
    context: options.ContextOption = None,
    kv_bytes: options.KvBytesOption = None,
    prefix_folder: options.PrefixFolderOption = None,
    prefix_cache_bytes: options.PrefixBytesOption = "1G",  # type: ignore[assignment]
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Time a step is kept near. Default: twice what its streams take without prompts.",
        ),
    ] = None,
) -> None:
    """Answer OpenAI-style requests with MODEL until Ctrl-C."""
    from martlet.scripts.generate import open_model
    from martlet.server import ServerOptions
    from martlet.server import serve as serve_http
    from martlet.server.options import is_loopback

    keys = tuple(api_key or ())
    if not is_loopback(host) and not keys:
        note(f"warning: {host} is open to the network and asks for no key; add --api-key")
    called = name or served_name(model)
    arguments = load.arguments(context=context, kv_bytes=kv_bytes)
    with open_model(model, **arguments) as opened:
        serve_http(
            opened,
            model_name=called,
            host=host,
            port=port,
            max_queue=max_queue,
            step_ms=step_ms,
            prefix_store=open_store(opened, prefix_folder, prefix_cache_bytes),
            options=ServerOptions(api_keys=keys, origins=tuple(origin or ())),
            on_ready=lambda url: announce(opened, called, url, needs_key=bool(keys)),
        )


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
    note(f"{name} at {url}/v1, {model.context} tokens of context")
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
