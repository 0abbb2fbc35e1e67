"""How soon a full server refuses, and what that costs those whom it answers.

    martlet serve MODEL --port 8080 --context 512 --max-queue 0
    python scripts/refusals.py http://127.0.0.1:8080 [--streams 32] [--rate 100] [--seconds 9]

So many streams fill the server; for a while they run alone, then others ask so often and are all
refused. Contexts grow meanwhile: `--rate 0.2` tells what the second half is without refusals.
Bytes go over plain sockets, as clients share the cores with the server. Knows no definitions of
latency, which are those of `martlet bench-serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from itertools import pairwise
from urllib.parse import urlsplit

from martlet.runtime.aggregates import percentile
from martlet.scripts.load_http import Connections

PROMPT = "Once upon a time there was a bird"


def body(n_tokens: int, *, is_stream: bool) -> bytes:
    asked = {"prompt": PROMPT, "max_tokens": n_tokens, "stream": is_stream, "temperature": 0}
    return json.dumps({**asked, "ignore_eos": True}).encode()


async def stream(url: str, n_tokens: int, stamps: list[float]) -> None:
    """Notes when bytes come, until it is cancelled or over."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    asked = body(n_tokens, is_stream=True)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n"
    head += "Connection: close\r\n\r\n"  # so that the end of an answer is seen
    writer.write(head.encode() + asked)
    try:
        while data := await reader.read(1 << 16):
            if b"data:" in data:
                stamps.append(time.perf_counter())
    finally:
        writer.close()


async def refused(connections: Connections, took_ms: list[float], statuses: Counter[int]) -> None:
    start = time.perf_counter()
    reply = await connections.ask("POST", "/v1/completions", body(64, is_stream=False))
    took_ms.append((time.perf_counter() - start) * 1e3)
    statuses[reply.status] += 1


def told(values: list[float]) -> str:
    p50, p99 = percentile(values, 50), percentile(values, 99)
    return f"p50 {p50:.1f}, p99 {p99:.1f}, worst {max(values):.1f} ms of {len(values)}"


def gaps_ms(stamps: list[list[float]], start: float, end: float) -> list[float]:
    pairs = (pair for each in stamps for pair in pairwise(each))
    return [(b - a) * 1e3 for a, b in pairs if start < b < end]


async def measure(url: str, n_streams: int, rate: float, seconds: float, n_tokens: int) -> None:
    stamps: list[list[float]] = [[] for _ in range(n_streams)]
    streams = [asyncio.create_task(stream(url, n_tokens, each)) for each in stamps]
    while not all(len(each) > 3 for each in stamps):
        if any(task.done() for task in streams):
            raise SystemExit("a stream has ended before all had begun: is there a place for each?")
        await asyncio.sleep(0.1)
    alone = time.perf_counter()
    await asyncio.sleep(seconds)
    start, took_ms, statuses = time.perf_counter(), list[float](), Counter[int]()
    connections, asked = Connections(url), list[asyncio.Task[None]]()
    while time.perf_counter() - start < seconds:
        await asyncio.sleep(max(0.0, start + len(asked) / rate - time.perf_counter()))
        asked.append(asyncio.create_task(refused(connections, took_ms, statuses)))
    await asyncio.gather(*asked)
    end = time.perf_counter()
    if any(task.done() for task in streams):
        raise SystemExit("a stream has ended meanwhile: ask for more --tokens, or fewer --seconds")
    print(f"gaps alone: {told(gaps_ms(stamps, alone, start))}")
    print(f"gaps with {rate:g} refusals a second: {told(gaps_ms(stamps, start, end))}")
    print(f"answers {dict(statuses)}: {told(took_ms)}")
    for task in streams:
        task.cancel()
    connections.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=100.0, help="refusals a second")
    parser.add_argument("--seconds", type=float, default=9.0, help="of each half")
    parser.add_argument("--tokens", type=int, default=440, help="of each stream, at most")
    args = parser.parse_args()
    asyncio.run(measure(args.url, args.streams, args.rate, args.seconds, args.tokens))


if __name__ == "__main__":
    main()
