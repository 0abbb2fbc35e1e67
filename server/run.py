"""Serves a loaded model, or a shelf of them, until it is told to stop.

Owns: serve, serve_shelf, the socket, the engine's life. Must not know: the command line, how models
load, what the routes do. Prints nothing: `on_ready` gets the address once requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ..runtime.drafts import Drafter
from ..runtime.engine import Engine
from ..runtime.errors import MartletError
from ..runtime.model import Model
from ..runtime.nextn_drafter import own_drafter
from ..runtime.prefix_store import PrefixStore
from ..runtime.speculation import speculation_of
from ..runtime.work import PlanWork, Speed, kv_value_bytes
from .app import create_app
from .facts import facts_of
from .lifecycle import Lifecycle
from .load import last_step
from .options import ADDRESSES, ANY, LOOPBACK_NAMES, ServerOptions, is_loopback
from .shelf import Loaded, Shelf
from .switch import create_shelf_app
from .wire import WireLimits, most_connections, protocol

DEFAULT_PORT = 8080
DEFAULT_QUEUE = 64
FAREWELL_S = 10
"""For the engine to end, after the step it is in, answers that may not go on, and for their clients
to be told."""


def serve(
    model: Model,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    max_queue: int = DEFAULT_QUEUE,
    step_rows: int | None = None,
    step_ms: float | None = None,
    speculate: str = "off",
    speculate_rule: str = "match",
    drafter: Drafter | None = None,
    prefix_store: PrefixStore | None = None,
    fingerprint: str = "martlet",
    chat_template: str | None = None,
    options: ServerOptions | None = None,
    limits: Speed | None = None,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
    on_drain: Callable[[int], None] = lambda n_inside: None,
) -> None:
    """Blocks until SIGINT (then returns) or SIGTERM (then ends the process, as it asks for).
    Running answers may finish for options.drain_s or until a second signal, while new ones are
    refused with 503; then they are ended.

    prefix_store: where known prefixes outlive the process. port 0 takes a free one. listener: from
    open_socket, where the address was to be had before the model; this closes it. on_drain: called
    with how many answers are waited for. Raises MartletError when the address cannot be had.
    """
    options = options_for_host(options or ServerOptions(), host)
    with listener or open_socket(host, port) as listener:
        held = hold(
            model,
            model_name=model_name,
            max_queue=max_queue,
            step_rows=step_rows,
            step_ms=step_ms,
            speculate=speculate,
            speculate_rule=speculate_rule,
            drafter=drafter,
            prefix_store=prefix_store,
            fingerprint=fingerprint,
            chat_template=chat_template,
            options=options,
            limits=limits,
        )
        run_app(held.app, listener, on_ready, on_drain, options, held.close)


def serve_shelf(
    shelf: Shelf,
    *,
    host: str,
    listener: socket.socket,
    options: ServerOptions,
    on_ready: Callable[[str], None] = lambda url: None,
    on_drain: Callable[[int], None] = lambda n_inside: None,
) -> None:
    """As serve does, over several models that are loaded when they are asked for."""
    app = create_shelf_app(shelf, options_for_host(options, host))
    with listener:
        run_app(app, listener, on_ready, on_drain, options, shelf.close)


def hold(
    model: Model,
    *,
    model_name: str,
    options: ServerOptions,
    lifecycle: Lifecycle | None = None,
    chat_template: str | None = None,
    fingerprint: str = "martlet",
    max_queue: int = DEFAULT_QUEUE,
    speculate: str = "off",
    speculate_rule: str = "match",
    drafter: Drafter | None = None,
    limits: Speed | None = None,
    **engine_options: Any,
) -> Loaded:
    """The model with a running engine and an app; lifecycle as in create_app; speculate, its rule
    and drafter as of speculation_of; without a drafter the model's own block guesses, if it has
    one; limits: of this machine, where they are known. Closing it ends the engine and leaves the
    model open."""
    shares, generates = [adapter.share for adapter in model.adapters], model.config.generates
    speculation = speculation_of(
        speculate,
        model.executor,
        drafter=drafter or own_drafter(model, speculate),
        generates=generates,
        n_adapters=len(shares),
        rule=speculate_rule,
    )
    engine = Engine(
        model.executor,
        model.tokenizer,
        context=model.context,
        pooling_type=model.config.pooling_type,
        generates=generates,
        max_queue=max_queue,
        adapters=shares,
        speculation=speculation,
        timeline=model.timeline,
        **engine_options,
    )
    counted = PlanWork(model.plan, kv_value_bytes(model.plan, model.kv_type))
    app = create_app(
        engine,
        model.tokenizer,
        model_name=model_name,
        context=model.context,
        max_unfinished=engine.scheduler.max_running + max_queue,
        chat_template=chat_template,
        fingerprint=fingerprint,
        adapters=tuple(adapter.name for adapter in model.adapters),
        facts=facts_of(model),
        options=options,
        lifecycle=lifecycle,
        last_step=partial(last_step, engine, counted, limits),
    )
    engine.start()
    return Loaded(app, app.state.service, engine.close)


def options_for_host(options: ServerOptions, host: str) -> ServerOptions:
    """Without a key, the Host check keeps out pages that got our address under their own name:
    they have a name of theirs in it, while we are called by our own or by an address. With a key
    such a page lacks the key."""
    if options.hosts != LOOPBACK_NAMES:
        return options
    if options.api_keys:
        return replace(options, hosts=(ANY,))
    if is_loopback(host):
        return options
    own = socket.gethostname().lower()
    return replace(options, hosts=(*LOOPBACK_NAMES, ADDRESSES, own, f"{own}.local"))


def open_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # asyncio turns Nagle's delay off only for sockets that name their protocol. With the delay
        # each small write after the first, so each token of a stream, waits up to 40 ms.
        return socket.socket(fileno=listener.detach(), proto=socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            why = "another program listens there, perhaps a martlet that still runs"
        raise MartletError(
            f"cannot listen on {host} port {port}: {why}; choose another host or port"
        ) from error


def run_app(
    app: Any,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    on_drain: Callable[[int], None],
    options: ServerOptions,
    end_answers: Callable[[], None],
) -> None:
    config = uvicorn_config(app, options)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = Polite(
        config,
        app.state.lifecycle,
        on_ready=lambda: on_ready(f"http://{shown}:{port}"),
        on_drain=on_drain,
        drain_s=options.drain_s,
        end_answers=end_answers,
    )
    try:
        # uvicorn repeats the signal it stopped for, after the last answer is out.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        end_answers()


def uvicorn_config(app: Any, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(WireLimits(options.head_s, most_connections())),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=FAREWELL_S,
    )


class Polite(uvicorn.Server):
    """A server that says when it answers, and lets no client hang when it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        *,
        on_ready: Callable[[], None],
        on_drain: Callable[[int], None],
        drain_s: float,
        end_answers: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._drain_s = drain_s
        self._end_answers = end_answers
        self._hurry: Callable[[], Any] | None = None

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(sockets=list(sockets) if sockets else None)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._lifecycle.drain()
        self._hurry = partial(loop.call_soon_threadsafe, self._lifecycle.hurry)
        # Until the last answer is out, others are still told that they come too late.
        if self._lifecycle.n_inside:
            self._on_drain(self._lifecycle.n_inside)
            await self._lifecycle.empty(self._drain_s)
        # In a thread, as it waits for the engine's step; and to its end before the signal is
        # repeated: SIGTERM then ends the process on the spot.
        ending = loop.run_in_executor(None, self._end_answers)
        await super().shutdown(sockets)
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, a second ends them, a third cuts them off."""
        hurry, self._hurry = self._hurry, None
        if hurry:
            hurry()
        else:
            super().handle_exit(sig, frame)
