"""HTTP/1.1 for a load: bytes out, bytes in with their moments, connections kept.
Owns sockets and the framing of bodies; must not know JSON or what an answer means.

A general client costs several times as much per piece of a stream, on the cores that serve."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from martlet.quant.errors import MartletError

MOST_HEADER = 1 << 16


class HttpError(MartletError):
    """What came is no answer."""


@dataclass
class Reply:
    status: int
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    """(time.monotonic_ns, bytes of the body) for each read."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Chunked:
    """Takes the framing off a body in chunks, however it was cut into reads."""

    def __init__(self) -> None:
        self.is_over = False
        self._held, self._left = b"", 0
        """_left: bytes of the chunk that are still to come, its line end included."""
        self._is_last = False

    def feed(self, data: bytes) -> bytes:
        data, out = self._held + data, []
        self._held = b""
        while data and not self.is_over:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                # The last two bytes of what is left are the chunk's line end.
                n_payload = min(len(part), max(0, self._left - 2))
                out.append(part[:n_payload])
                self._left -= len(part)
                continue
            end = data.find(b"\r\n")
            if end < 0:
                self._held = data
                break
            line, data = data[:end], data[end + 2 :]
            if self._is_last:  # trailers, up to an empty line, which may come by itself
                self.is_over = not line
                continue
            size = int(line.split(b";")[0], 16)
            self._is_last, self._left = size == 0, size + 2 if size else 0
        return b"".join(out)


class Counted:
    """A body of a length that was told."""

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def feed(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data


class Endless:
    """A body that ends with its connection."""

    is_over = False

    def feed(self, data: bytes) -> bytes:
        return data


class Closed(Exception):
    """Before any byte of an answer came."""


class Wire(asyncio.Protocol):
    """One connection. Bytes are noted where the loop hands them over: waking a task for each piece
    would cost twice as much."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    async def ask(self, asked: bytes) -> Reply:
        """Raises Closed, HttpError; when it is cancelled, the connection goes."""
        if not self.is_open:
            raise Closed
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._reply, self._is_kept = b"", Reply(0), True
        self._body: Chunked | Counted | Endless | None = None
        self._transport.write(asked)
        try:
            return await self._answer
        finally:
            self._answer = None
            if not self._is_kept or self._body is None or not self._body.is_over:
                self.close()

    def data_received(self, data: bytes) -> None:
        at_ns = time.monotonic_ns()
        if self._answer is None or self._answer.done():  # nobody asked
            self.close()
            return
        try:
            if self._body is None:
                self._head += data
                head, end, data = self._head.partition(b"\r\n\r\n")
                if not end:
                    if len(head) > MOST_HEADER:
                        raise HttpError("the server's headers do not end")
                    return
                self._body = self._begin(head)
            self._reply.pieces.append((at_ns, self._body.feed(data)))
        except (HttpError, ValueError, IndexError) as error:
            self._answer.set_exception(HttpError(f"no HTTP answer: {error}"))
            return
        if self._body.is_over:
            self._answer.set_result(self._reply)

    def _begin(self, head: bytes) -> Chunked | Counted | Endless:
        first, *lines = head.decode("latin-1").split("\r\n")
        self._reply.status = int(first.split()[1])
        split = (line.partition(":") for line in lines)
        fields = {name.strip().lower(): value.strip() for name, _, value in split}
        self._is_kept = fields.get("connection", "").lower() != "close"
        if "chunked" in fields.get("transfer-encoding", "").lower():
            return Chunked()
        length = fields.get("content-length")
        return Endless() if length is None else Counted(int(length))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        answer = self._answer
        if answer is None or answer.done():
            return
        if isinstance(self._body, Endless):
            answer.set_result(self._reply)
        elif self._body is None and not self._head:
            answer.set_exception(Closed())
        else:
            answer.set_exception(
                HttpError("the server closed the connection in the middle of an answer")
            )

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()


class Connections:
    """To one server, as many as are asked for at a time; an idle one is taken again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is no http:// or https:// address")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._base = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if self._tls else 80)
        self._netloc = parts.netloc.rpartition("@")[2]
        self._idle: list[Wire] = []

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """The whole reply. Raises OSError, HttpError; what is cancelled closes its connection."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        asked = "\r\n".join([*lines, "", ""]).encode() + body
        while self._idle:
            with contextlib.suppress(Closed):  # by the server, while it was idle
                return await self._over(self._idle.pop(), asked)
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(Wire, self._host, self._port, ssl=self._tls)
        try:
            return await self._over(wire, asked)
        except Closed:
            raise HttpError("the server closed the connection before it answered") from None

    async def _over(self, wire: Wire, asked: bytes) -> Reply:
        reply = await wire.ask(asked)
        if wire.is_open:
            self._idle.append(wire)
        return reply

    def close(self) -> None:
        for wire in self._idle:
            wire.close()
        self._idle.clear()
