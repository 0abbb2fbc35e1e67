"""The recipes of docs/recipes: streams pass unbuffered, leaving reaches the engine, a process that
is not there or full is passed over."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import chat_body, serving, wait_until

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
PATH = "/v1/chat/completions"
TOKEN_S = 0.05
LITELLM = os.environ.get("MARTLET_LITELLM", "litellm")  # large, and not installed for tests
# kind -> (recipe, command; {folder} has it, what answers when it is there)
GATEWAYS = {
    "nginx": (
        "nginx.conf",
        ["nginx", "-p", "{folder}", "-c", "nginx.conf", "-g", "daemon off;"],
        "/health",
    ),
    "haproxy": ("haproxy.cfg", ["haproxy", "-f", "{folder}/haproxy.cfg"], "/health"),
    "litellm": (
        "litellm.yaml",
        [LITELLM, "--config", "{folder}/litellm.yaml", "--host", "127.0.0.1", "--port", "{port}"],
        "/health/liveliness",
    ),
}
START_S = 120.0

if not RECIPES.exists():
    pytest.skip("not in a checkout", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def behind(kind: str, folder: Path, *upstreams: int) -> Iterator[httpx.Client]:
    """A client of the gateway over these ports of martlet."""
    name, command, path = GATEWAYS[kind]
    program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip(f"{kind} is not installed")
    port = free_port()
    recipe = (RECIPES / name).read_text()
    for before, after in ((8080, upstreams[0]), (8081, upstreams[1]), (8000, port)):
        assert recipe.count(f"127.0.0.1:{before}") == 1
        recipe = recipe.replace(f"127.0.0.1:{before}", f"127.0.0.1:{after}")
    (folder / name).write_text(recipe)
    words = [program, *(word.format(folder=folder, port=port) for word in command[1:])]
    key = f"sk-{secrets.token_hex(32)}"
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    environ = {**os.environ, **own, "no_proxy": "127.0.0.1"}
    log = folder / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(words, stdout=said, stderr=said, env=environ) as child,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
                wait_until(lambda: is_there(client, path, child, log), START_S)
                yield client
        finally:
            child.terminate()


def is_there(client: httpx.Client, path: str, child: subprocess.Popen[bytes], log: Path) -> bool:
    if child.poll() is not None:
        pytest.fail(log.read_text())
    with contextlib.suppress(httpx.TransportError):
        return client.get(path).status_code == 200
    return False


@pytest.fixture(params=GATEWAYS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pieces(client: httpx.Client) -> Iterator[tuple[float, dict[str, Any]]]:
    """(seconds from the start, piece) of a stream."""
    start = time.monotonic()
    with client.stream("POST", PATH, json=chat_body() | {"stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield time.monotonic() - start, json.loads(line[6:])


def ports(*clients: httpx.Client) -> list[int]:
    return [int(client.base_url.port or 0) for client in clients]


def test_a_stream_passes_piece_by_piece(kind: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(says("a stream of many tokens"), token_s=TOKEN_S)
    with serving(engine) as direct, behind(kind, tmp_path, *ports(direct, direct)) as client:
        firsts_ms: dict[httpx.Client, list[float]] = {direct: [], client: []}
        for _ in range(5):
            for each, firsts in firsts_ms.items():
                times = [at for at, _ in pieces(each)]
                assert times[-1] - times[0] > 10 * TOKEN_S, "not all at the end"
                firsts.append(times[0] * 1e3)
        # Not on a busy machine each time, but a gateway that holds pieces back never is quick.
        assert min(firsts_ms[client]) - min(firsts_ms[direct]) < 50


def test_who_leaves_takes_the_request_along(kind: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(says("", end=False), token_s=TOKEN_S)
    with serving(engine) as direct, behind(kind, tmp_path, *ports(direct, direct)) as client:
        stream = pieces(client)
        next(stream)
        assert engine.n_unfinished == 1
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: engine.n_unfinished == 0)


def test_a_process_that_is_not_there_is_passed_over(kind: str, tmp_path: Path) -> None:
    with (
        serving(ScriptedEngine()) as direct,
        behind(kind, tmp_path, free_port(), *ports(direct)) as client,
    ):
        for _ in range(6):
            assert client.post(PATH, json=chat_body()).status_code == 200


def test_a_full_process_is_passed_over(kind: str, tmp_path: Path) -> None:
    full, free = ScriptedEngine(max_queue=0, slots=1), ScriptedEngine()
    with (
        serving(full) as first,
        serving(free) as second,
        behind(kind, tmp_path, *ports(first, second)) as client,
    ):
        full.unpaused.clear()
        with first.stream("POST", PATH, json=chat_body() | {"stream": True}):
            wait_until(lambda: full.n_unfinished == 1)
            for _ in range(6):
                assert client.post(PATH, json=chat_body()).status_code == 200
            full.unpaused.set()
