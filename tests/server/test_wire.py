"""Connections that bring no request, or not all of one: slow, endless, garbled, too many."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from martlet.server import wire

from .scripted_engine import ScriptedEngine, says
from .serving import assert_works, chat_body, serving, wait_until

PATH = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
HEAD_S = 0.3
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
IDLE = int(os.environ.get("MARTLET_IDLE_CONNECTIONS", "1000"))
"""10000 for the whole of it: each takes a descriptor here and one in the server."""

protocols = pytest.mark.parametrize("kind", ["httptools", "h11"])


@pytest.fixture
def client(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    if kind == "h11":
        monkeypatch.setattr(wire, "HttpToolsProtocol", None)
    with serving(ScriptedEngine(), head_s=HEAD_S) as client:
        yield client


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.base_url.port or 0), 5)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def drip(connection: socket.socket, data: bytes, pause_s: float, most_s: float = 5.0) -> float:
    """Sends byte by byte until the server closes; gives the seconds that took."""
    start_s = time.monotonic()
    connection.settimeout(pause_s)
    for at in range(len(data)):
        assert time.monotonic() < start_s + most_s, "the server still listens"
        try:
            connection.sendall(data[at : at + 1])
            if connection.recv(100) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return time.monotonic() - start_s


@protocols
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come_is_not_waited_for(client: httpx.Client, sent: bytes) -> None:
    with connect(client) as connection:
        start_s = time.monotonic()
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert HEAD_S * 0.9 < time.monotonic() - start_s < HEAD_S + 2
    assert_works(client)


@protocols
def test_bytes_that_keep_coming_buy_no_time(client: httpx.Client) -> None:
    with connect(client) as connection:
        assert drip(connection, b"GET /health HTTP/1.1\r\nX: " + b"x" * 9999, 0.02) < HEAD_S + 2
    with connect(client) as connection:  # behind an answer, too
        connection.sendall(GET)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert drip(connection, b"\r\n" * 999, 0.02) < HEAD_S + 2
    assert_works(client)


@protocols
def test_a_slow_answer_is_no_slow_head(client: httpx.Client) -> None:
    engine = ScriptedEngine(token_s=0.2)
    with serving(engine, head_s=HEAD_S) as slow:
        for _ in range(2):
            assert_works(slow)


@protocols
@pytest.mark.parametrize(
    "begins", [b"GET /health HTTP/1.1\r\nX: ", b"GET /health?", b"GET /health HTTP/1.1\r\nX: 1"]
)
def test_endless_heads_are_refused_by_their_size(client: httpx.Client, begins: bytes) -> None:
    n_bytes, more = 0, (b"\r\nX: 1" if begins.endswith(b"1") else b"x") * 4000
    with connect(client) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begins)
        while n_bytes < 8 << 20:
            n_bytes += connection.send(more)
        pytest.fail("all of it was taken")
    assert_works(client)


@protocols
def test_endless_trailers_and_chunk_extensions_are_no_body(client: httpx.Client) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for begins, more in ((b"0\r\n", b"X: 1\r\n" * 4000), (b"1;a=", b"x" * 20000)):
        n_bytes = 0
        with connect(client) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + begins)
            while n_bytes < 8 << 20:
                n_bytes += connection.send(more)
            pytest.fail("all of it was taken")
        assert_works(client)


@protocols
def test_a_body_in_the_smallest_chunks_is_taken(client: httpx.Client) -> None:
    body = httpx.Request("POST", "http://x", json=chat_body("x" * 3000)).content
    chunks = (body[at : at + 1] for at in range(len(body)))
    headers = {"content-type": "application/json"}
    assert client.post(PATH, content=chunks, headers=headers).status_code == 200


@protocols
@pytest.mark.parametrize(
    "behind", [b"\x00\xff garbage \r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 50 + b"NONSENSE\r\n\r\n"]
)
def test_garbage_behind_requests_spoils_no_answer_before_it(
    client: httpx.Client, behind: bytes
) -> None:
    with connect(client) as connection:
        connection.sendall(GET * 3 + behind)
        connection.shutdown(socket.SHUT_WR)
        found = read_all(connection)
    assert found.count(b'{"status":"ok"}') <= 3
    assert_works(client)


def test_a_thousand_requests_at_once_on_one_connection() -> None:
    with serving(ScriptedEngine()) as client, connect(client) as connection:
        connection.sendall(GET * 1000)
        found = b""
        while found.count(b'{"status":"ok"}') < 1000:
            piece = connection.recv(1 << 16)
            assert piece, found[-300:]
            found += piece
        assert_works(client)


def pipelined_ask() -> bytes:
    body = httpx.Request("POST", "http://x", json=chat_body()).content
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("n_asked", [1, 2, 3])
@pytest.mark.parametrize("how", ["half", "whole"])
def test_a_client_that_stops_sending_or_leaves_has_no_request(n_asked: int, how: str) -> None:
    """Also where it has asked for more than one thing at once."""
    engine = ScriptedEngine(says("x", end=False), token_s=0.01)
    with serving(engine) as client:
        connection = connect(client)
        connection.sendall(pipelined_ask() * n_asked)
        wait_until(lambda: engine.n_unfinished == 1 and engine.requests[0].n_emitted > 2)
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        wait_until(lambda: not engine.n_unfinished)
        assert [request.reason for request in engine.requests] == ["cancelled"]
        connection.close()
        assert_works(client)


def test_a_client_that_reads_a_byte_at_a_time_holds_up_no_other() -> None:
    engine = ScriptedEngine(says("x" * 300))
    with serving(engine) as client, connect(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(pipelined_ask().replace(b'"tiny"', b'"tiny","stream":true', 1))
        for _ in range(5):
            assert connection.recv(1)
            time.sleep(0.01)
            assert_works(client)


CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from tests.server.serve_scripted import main
main()
"""


@contextlib.contextmanager
def child(n_descriptors: int) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-c", CHILD, str(n_descriptors)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
                yield process, client
        finally:
            process.kill()


def cpu_s(process: subprocess.Popen[Any]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_idle_connections_cost_others_nothing_and_too_many_are_told() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = IDLE + 1 + wire.SPARE_DESCRIPTORS  # one is for whoever asks
    if hard < n + 100:
        pytest.skip(f"{n + 100} descriptors are needed, the system gives {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n + 100), hard))
    try:
        with child(n) as (process, client), contextlib.ExitStack() as held:
            assert_works(client)
            idle = [held.enter_context(connect(client)) for _ in range(IDLE)]
            start_s = time.monotonic()
            for _ in range(5):
                assert_works(client)
            assert time.monotonic() - start_s < 5
            with connect(client) as connection:
                assert read_all(connection).startswith(b"HTTP/1.1 503 ")
            before_s = cpu_s(process)
            time.sleep(0.5)
            assert cpu_s(process) - before_s < 0.2
            idle[0].close()
            wait_until(lambda: is_let_in(client))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_let_in(client: httpx.Client) -> bool:
    with connect(client) as connection:
        connection.sendall(GET)
        return connection.recv(100).startswith(b"HTTP/1.1 200 ")
