"""HTTP/1.1 for a load: bytes out, bytes in with their moments, connections kept.
Owns sockets and the framing of bodies; must not know JSON or what an answer means.

A general client costs several times as much per piece of a stream, on the cores that serve."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from martlet.quant.errors import MartletError

READ_BYTES = 1 << 16


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
            size = int(data[:end].split(b";")[0], 16)
            data = data[end + 2 :]
            self.is_over, self._left = size == 0, size + 2 if size else 0
        return b"".join(out)


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
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """The whole reply. Raises OSError, HttpError; what is cancelled closes its connection."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        asked = "\r\n".join([*lines, "", ""]).encode() + body
        while self._idle:
            reader, writer = self._idle.pop()
            head = await self._head(reader, writer, asked)
            if head is not None:  # else the server has closed it meanwhile
                return await self._body(reader, writer, head)
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        head = await self._head(reader, writer, asked)
        if head is None:
            raise HttpError("the server closed the connection before it answered")
        return await self._body(reader, writer, head)

    async def _head(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes
    ) -> bytes | None:
        """None where the connection was closed before any byte came."""
        head = None
        try:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if getattr(error, "partial", b""):
                raise HttpError("the server closed the connection within its headers") from None
        except asyncio.LimitOverrunError:
            raise HttpError("the server's headers do not end") from None
        finally:
            if head is None:
                writer.close()
        return head

    async def _body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> Reply:
        is_kept = False
        try:
            reply, is_kept = await _read(reader, head)
            return reply
        finally:
            if is_kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader, head: bytes) -> tuple[Reply, bool]:
    """The reply, and whether its connection can be used again."""
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(first.split()[1])
    except (IndexError, ValueError):
        raise HttpError(f"{first[:80]!r} is no HTTP status line") from None
    split = (line.partition(":") for line in lines)
    fields = {name.strip().lower(): value.strip() for name, _, value in split}
    reply = Reply(status)
    is_kept = fields.get("connection", "").lower() != "close"
    if "chunked" in fields.get("transfer-encoding", "").lower():
        chunked = Chunked()
        while not chunked.is_over:
            data = await _some(reader)
            at_ns = time.monotonic_ns()
            reply.pieces.append((at_ns, chunked.feed(data)))
    elif "content-length" in fields:
        left = int(fields["content-length"])
        while left > 0:
            data = await _some(reader)
            reply.pieces.append((time.monotonic_ns(), data))
            left -= len(data)
    else:
        is_kept = False
        while data := await reader.read(READ_BYTES):
            reply.pieces.append((time.monotonic_ns(), data))
    return reply, is_kept


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(READ_BYTES)
    if not data:
        raise HttpError("the server closed the connection in the middle of an answer")
    return data
