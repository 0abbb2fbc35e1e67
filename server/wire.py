"""Connections, before there is a request: how many, how long a head may take, how large it is.

Owns: those limits, and telling a request that its client has gone. Must not know: what comes after
a head, which is the guard's.

The server beneath waits for ever for the first byte and for the last one of a head, and keeps what
it has of it. Here a head has its time from the connection on or from its first byte after an
answer; the time between answers is the server's own limit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # where httptools has no wheel
    HttpToolsProtocol = None  # type: ignore[assignment,misc]

try:
    import resource
except ImportError:  # Windows, where a process may have as many as there is memory for
    resource = None  # type: ignore[assignment]

MOST_DESCRIPTORS = 65_536
SPARE_DESCRIPTORS = 64
"""For files, and for those who are told that there are too many."""
MAX_HEAD_BYTES = 64 << 10
FRAME_BYTES = 8
"""What may come with a byte of a body in chunks of one byte each."""


@dataclass(frozen=True)
class WireLimits:
    head_s: float = 30.0
    """From a connection, or from the first byte after an answer, to the end of the head."""
    max_connections: int | None = None
    """At a time; None: as many as there are descriptors, but a few."""


class _Patient(asyncio.Protocol):
    """What both protocols of uvicorn have in common. A head is complete when a cycle of request and
    response has begun for it."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    cycle: Any

    def __init__(self, *args: Any, limits: WireLimits, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self._limits.max_connections
        if most is not None and len(self.connections) > most:
            self._refuse(b"503 Service Unavailable", b"retry-after: 5\r\n")
        else:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._await_head()
        super().data_received(data)
        if not self._is_between:
            self._stop_timer()

    @property
    def _is_between(self) -> bool:
        """No request is there, or its answer is out."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._is_between and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_s, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _out_of_time(self) -> None:
        self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes, header: bytes = b"") -> None:
        if self.transport.is_closing():
            return
        if self._is_between:  # else the client is reading something else
            head = b"HTTP/1.1 %b\r\n%bconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head % (status, header))
        self.transport.close()


class PatientH11(_Patient, H11Protocol):
    """Limits heads and trailers by itself."""


if HttpToolsProtocol is not None:

    class PatientHttpTools(_Patient, HttpToolsProtocol):
        """Counts what is no body: its parser keeps heads and trailers of any size."""

        _n_beside = _n_body = 0
        _running: Any = None

        def data_received(self, data: bytes) -> None:
            self._n_beside += len(data)
            super().data_received(data)
            if self._n_beside > MAX_HEAD_BYTES + FRAME_BYTES * self._n_body:
                self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            self._n_beside = self._n_body = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._n_beside = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._n_beside -= len(body)
            self._n_body += len(body)
            super().on_body(body)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def connection_lost(self, error: Exception | None) -> None:
            # The base tells the newest request alone; others of a pipeline wait for this one.
            if self._running is not None and not self._running.response_complete:
                self._running.disconnected = True
                self._running.message_event.set()
            super().connection_lost(error)


def protocol(limits: WireLimits) -> Any:
    """What uvicorn makes for each connection."""
    kind: type[_Patient] = PatientH11 if HttpToolsProtocol is None else PatientHttpTools
    return partial(kind, limits=limits)


def most_connections() -> int | None:
    """As many as the system lets this process have; asks it for more first."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return None if soft == resource.RLIM_INFINITY else max(1, soft - SPARE_DESCRIPTORS)
