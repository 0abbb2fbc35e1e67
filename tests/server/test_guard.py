"""Who may come in: hosts, origins, keys, types and sizes. Each refusal leaves the engine alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from martlet.server.guard import Guard
from martlet.server.options import ServerOptions
from martlet.server.run import options_for_host

from .scripted_engine import ScriptedEngine
from .serving import assert_refused, assert_works, chat_body, serving

PATH = "/v1/chat/completions"
ORIGIN = "http://app.example"
KEY = "sk-right"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with serving(engine, max_body_bytes=2000) as client:
        yield client


@pytest.fixture(scope="module")
def keyed() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine(), api_keys=("other", KEY), origins=(ORIGIN,)) as client:
        yield client


def post(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post(PATH, json=chat_body(), headers=headers)


@pytest.mark.parametrize(
    "host",
    ["evil.example:8080", "evil.example", "", "localhost.evil.example", "[::2]:80", "[bad", "a b"],
)
def test_b120_foreign_host(client: httpx.Client, engine: ScriptedEngine, host: str) -> None:
    n_before = len(engine.requests)
    assert_refused(post(client, host=host), 403)
    assert_refused(client.get("/v1/models", headers={"host": host}), 403)
    assert len(engine.requests) == n_before
    assert_works(client)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:99", "127.0.0.1:80", "[::1]:80", "[::1]", "LOCALHOST"]
)
def test_b120_loopback_names(client: httpx.Client, host: str) -> None:
    assert post(client, host=host).status_code == 200


def test_b120_allow_list() -> None:
    with serving(ScriptedEngine(), hosts=("127.0.0.1", "box.lan")) as client:
        assert post(client, host="box.lan:8080").status_code == 200
        assert_refused(post(client, host="localhost"), 403)
        assert_works(client)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_b120_simple_posts(client: httpx.Client, engine: ScriptedEngine, kind: str | None) -> None:
    n_before = len(engine.requests)
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"messages":[{"role":"user","content":"x"}]}'
    assert_refused(client.post(PATH, content=body, headers=headers), 415)
    assert len(engine.requests) == n_before
    assert_works(client)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://[", ""]
)
def test_b120_foreign_origin(client: httpx.Client, engine: ScriptedEngine, origin: str) -> None:
    n_before = len(engine.requests)
    answer = post(client, origin=origin)
    assert_refused(answer, 403)
    assert "access-control-allow-origin" not in answer.headers
    assert len(engine.requests) == n_before
    assert_works(client)


def test_own_origin_passes(client: httpx.Client) -> None:
    assert post(client, origin=str(client.base_url).rstrip("/")).status_code == 200


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return client.options(PATH, headers=headers)


def test_b118_preflight_needs_no_key(keyed: httpx.Client) -> None:
    answer = preflight(keyed, ORIGIN)
    assert answer.status_code in (200, 204)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-origin" not in preflight(keyed, "http://other.example").headers


@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY, "Bearer \xe9"]
)
def test_b118_wrong_keys(keyed: httpx.Client, key: str | None) -> None:
    headers = {"origin": ORIGIN, **({"authorization": key} if key else {})}
    answer = keyed.post(
        PATH,
        json=chat_body(),
        headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
    )
    error = assert_refused(answer, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.text


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_b118_right_key(keyed: httpx.Client, headers: dict[str, str]) -> None:
    assert post(keyed, origin=ORIGIN, **headers).status_code == 200
    assert keyed.get("/metrics", headers=headers).status_code == 200


def test_key_covers_all_but_health(keyed: httpx.Client) -> None:
    assert keyed.get("/health").status_code == 200
    for path in ("/metrics", "/v1/models", "/nowhere"):
        assert_refused(keyed.get(path), 401)


def test_any_origin_comes_without_credentials() -> None:
    with serving(ScriptedEngine(), origins=("*",)) as client:
        answer = post(client, origin="https://any.example")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_b120_keyless_on_the_network_knows_addresses_and_its_own_name() -> None:
    options = options_for_host(ServerOptions(), "0.0.0.0")
    own = socket.gethostname()
    with serving(ScriptedEngine(), hosts=options.hosts) as client:
        for host in ("192.168.1.7:8080", "[fe80::1]:8080", "127.0.0.1", "localhost", own):
            assert post(client, host=host).status_code == 200
        for host in ("evil.example", "192.168.1.7.evil.example", "1.2.3.4.5", ""):
            assert_refused(post(client, host=host), 403)


def test_large_body_is_refused_by_its_length(client: httpx.Client) -> None:
    assert_refused(client.post(PATH, json=chat_body("x" * 3000)), 413)
    assert_works(client)


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "br", "ZSTD"])
def test_no_body_is_decompressed(client: httpx.Client, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = gzip.compress(json.dumps(chat_body("hi")).encode())
    error = assert_refused(client.post(PATH, content=body, headers=headers), 415)
    assert error["code"] == "unsupported_content_encoding"
    headers["content-encoding"] = "identity"
    plain = client.post(PATH, content=json.dumps(chat_body("hi")), headers=headers)
    assert plain.status_code == 200


def test_large_body_without_length_is_refused_while_read(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"messages":"'
        for _ in range(30):
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    assert_refused(client.post(PATH, content=chunks(), headers=headers), 413)
    assert_works(client)


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    with serving(ScriptedEngine(), body_s=0.3) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 5) as connection:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert_works(client)


def test_the_time_limit_of_the_body_is_none_for_the_answer() -> None:
    engine = ScriptedEngine(token_s=0.2)
    with serving(engine, body_s=0.3) as client:
        assert post(client).json()["choices"][0]["message"]["content"] == "hello"


def test_request_id_is_taken_or_made(client: httpx.Client) -> None:
    assert post(client, **{"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 65, "a b"):
        made = post(client, **{"x-request-id": bad}).headers["x-request-id"]
        assert made
        assert made != bad
    assert client.get("/nowhere").headers["x-request-id"]


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        b"Content-Type: application/json\r\n\r\n{",
        b"\x00" * 100,
    ],
)
def test_broken_http_does_not_end_the_server(client: httpx.Client, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 5) as connection:
        connection.sendall(raw)
    assert_works(client)


@pytest.mark.parametrize(
    ("host", "options", "expected"),
    [
        ("127.0.0.1", {}, ("localhost", "127.0.0.1", "::1")),
        ("localhost", {}, ("localhost", "127.0.0.1", "::1")),
        ("127.0.0.1", {"api_keys": ("k",)}, ("*",)),
        ("0.0.0.0", {"api_keys": ("k",)}, ("*",)),
        ("0.0.0.0", {"hosts": ("box",)}, ("box",)),
    ],
)
def test_host_names_by_address(host: str, options: Any, expected: tuple[str, ...]) -> None:
    assert options_for_host(ServerOptions(**options), host).hosts == expected


HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@pytest.mark.parametrize("path", [PATH, "/", "/health", "/nothing"])
def test_websockets_are_refused_by_the_same_rules(keyed: httpx.Client, path: str) -> None:
    right = {**HANDSHAKE, "Authorization": f"Bearer {KEY}"}
    assert "speaks WebSocket" in assert_refused(keyed.get(path, headers=right), 404)["message"]
    assert_refused(keyed.get(path, headers=HANDSHAKE), 401)
    assert_refused(keyed.get(path, headers=right | {"Origin": "http://evil.example"}), 403)
    assert_works(keyed, headers={"Authorization": f"Bearer {KEY}"})


def test_websockets_of_a_foreign_host_are_refused(client: httpx.Client) -> None:
    foreign = client.get(PATH, headers=HANDSHAKE | {"Host": "evil.example"})
    assert assert_refused(foreign, 403)["code"] == "host_not_allowed"


def test_a_handshake_that_takes_no_answer_in_words_is_closed() -> None:
    reached, sent = [], []

    async def app(*_: Any) -> None:
        reached.append(True)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    headers = [(b"host", b"localhost")]
    scope = {"type": "websocket", "path": PATH, "headers": headers, "extensions": {}}
    asyncio.run(Guard(app, ServerOptions())(scope, app, send))
    assert (sent, reached) == (["websocket.close"], [])
