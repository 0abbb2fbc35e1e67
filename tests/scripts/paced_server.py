"""A server that answers what it is told, at moments it is told: for clients that measure.

A prompt is a JSON list of steps: milliseconds to wait, then what to send (a string of text, or an
object that becomes the event), so that each test says what its answers are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

HEAD = "HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"


class PacedServer:
    """asked: bodies of requests, in the order in which they came."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.n_connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("Content-Length", 0)))
                if head.startswith("GET"):
                    await self.page(writer, head.split()[1])
                else:
                    asked = json.loads(body)
                    self.asked.append(asked)
                    await self.answer(writer, asked)
        writer.close()

    async def page(self, writer: asyncio.StreamWriter, path: str) -> None:
        is_list = path == "/v1/models"
        writer.write(HEAD.format(status=200 if is_list else 404, kind="application/json").encode())
        await self.send(writer, json.dumps({"data": [{"id": "paced"}]}).encode())
        writer.write(b"0\r\n\r\n")

    async def answer(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        script = self.script(asked)
        kind = "text/event-stream" if asked["stream"] else "application/json"
        status = next((each["status"] for _, each in script if "status" in each), 200)
        writer.write(HEAD.format(status=status, kind=kind).encode())
        whole: dict[str, Any] = {}
        for wait_ms, event in script:
            await asyncio.sleep(wait_ms / 1e3)
            if "close" in event:
                writer.close()
                return
            if asked["stream"]:
                await self.send(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            whole = {**whole, **event}
        if "cut" in whole:
            writer.write(b"0\r\n\r\n")
            return
        last = b"data: [DONE]\n\n" if asked["stream"] else json.dumps(whole).encode()
        await self.send(writer, last)
        writer.write(b"0\r\n\r\n")

    def script(self, asked: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
        """A text that is no script is answered with max_tokens pieces, one each millisecond."""
        prompt = asked.get("prompt", "")
        if prompt.startswith("["):
            return [(wait, piece(what)) for wait, what in json.loads(prompt)]
        n = asked["max_tokens"]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": n}
        return [*((1, piece("x")) for _ in range(n)), (0, end("length", usage))]

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """In two writes, so that frames of the body are cut anywhere."""
        framed = b"%x\r\n%s\r\n" % (len(data), data)
        writer.write(framed[:3])
        await asyncio.sleep(0)
        writer.write(framed[3:])
        with contextlib.suppress(ConnectionError):
            await writer.drain()


def piece(what: Any) -> dict[str, Any]:
    return {"choices": [{"text": what, "finish_reason": None}]} if isinstance(what, str) else what


def end(reason: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"choices": [{"text": "", "finish_reason": reason}]}
    return {**event, "usage": usage} if usage else event


@contextlib.contextmanager
def paced_server() -> Iterator[tuple[str, PacedServer]]:
    """Its address, and what it was asked."""
    paced, started, loop = PacedServer(), threading.Event(), asyncio.new_event_loop()
    port = 0

    async def serve() -> None:
        nonlocal port
        server = await asyncio.start_server(paced.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()

    def run() -> None:
        loop.create_task(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}", paced
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
