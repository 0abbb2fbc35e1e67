"""Serves one loaded model until it is told to stop.

Owns: serve, the socket, the engine's life. Must not know: the command line, how models load, what
the routes do. Prints nothing: `on_ready` gets the address once requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ..runtime.engine import Engine
from ..runtime.errors import MartletError
from ..runtime.model import Model
from ..runtime.prefix_store import PrefixStore
from .app import create_app
from .facts import facts_of
from .options import LOOPBACK_NAMES, ServerOptions, is_loopback

DEFAULT_PORT = 8080
SHUTDOWN_S = 5
"""Answers may take this long to finish once the server is told to stop."""
FAREWELL_S = 10
"""Then the engine ends them after the step it is in, and their clients are told."""


def serve(
    model: Model,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    max_queue: int = 64,
    step_rows: int | None = None,
    step_ms: float | None = None,
    prefix_store: PrefixStore | None = None,
    fingerprint: str = "martlet",
    chat_template: str | None = None,
    options: ServerOptions | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Blocks until SIGINT (then returns) or SIGTERM (then ends the process, as it asks for).
    Running answers may finish for SHUTDOWN_S or until a second signal; then they are ended.

    prefix_store: where known prefixes outlive the process. port 0 takes a free one. Raises
    MartletError when the address cannot be had.
    """
    tokenizer, context = model.tokenizer, model.context
    with open_socket(host, port) as listener:
        engine = Engine(
            model.executor,
            tokenizer,
            context=context,
            max_queue=max_queue,
            step_rows=step_rows,
            step_ms=step_ms,
            prefix_store=prefix_store,
        )
        app = create_app(
            engine,
            tokenizer,
            model_name=model_name,
            context=context,
            chat_template=chat_template,
            fingerprint=fingerprint,
            facts=facts_of(model),
            options=options_for_host(options or ServerOptions(), host),
        )
        engine.start()
        try:
            # uvicorn repeats the signal it stopped for, after the last answer is out.
            with contextlib.suppress(KeyboardInterrupt):
                run_app(app, listener, on_ready, end_answers=engine.close)
        finally:
            engine.close()


def options_for_host(options: ServerOptions, host: str) -> ServerOptions:
    """The Host check protects keyless loopback servers; with a key or a network address a page
    from elsewhere either lacks the key or is as welcome as anybody."""
    is_default = options.hosts == LOOPBACK_NAMES
    if is_default and (options.api_keys or not is_loopback(host)):
        return replace(options, hosts=("*",))
    return options


def open_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # asyncio turns Nagle's delay off only for sockets that name their protocol. With the delay
        # each small write after the first, so each token of a stream, waits up to 40 ms.
        return socket.socket(fileno=listener.detach(), proto=socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise MartletError(
            f"cannot listen on {host} port {port}: {error}; choose another host or port"
        ) from error


def run_app(
    app: Any,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    *,
    end_answers: Callable[[], None],
) -> None:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_S + FAREWELL_S,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = Polite(config, lambda: on_ready(f"http://{shown}:{port}"), end_answers)
    server.run(sockets=[listener])


class Polite(uvicorn.Server):
    """A server that says when it answers, and lets no client hang when it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        end_answers: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._end_answers = end_answers
        self._hurry: Callable[[], Any] | None = None

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(sockets=list(sockets) if sockets else None)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ending: list[asyncio.Future[None]] = []

        def end() -> None:
            if not ending:  # in a thread, as it waits for the engine's step
                ending.append(loop.run_in_executor(None, self._end_answers))

        late = loop.call_later(SHUTDOWN_S, end)
        self._hurry = partial(loop.call_soon_threadsafe, end)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
        # Before the signal is repeated: SIGTERM then ends the process on the spot.
        end()
        await ending[0]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, a second ends them, a third cuts them off."""
        hurry, self._hurry = self._hurry, None
        if hurry:
            hurry()
        else:
            super().handle_exit(sig, frame)
