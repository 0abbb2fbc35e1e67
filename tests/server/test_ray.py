"""Replicas on Ray Serve: the answers of one engine, whichever gives them, and what a death does.

Ray is large and not installed for tests: `pip install 'martlet[ray]'` has this file run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from martlet.runtime.model import load_model
from martlet.server.in_process import ask
from martlet.server.options import ServerOptions
from martlet.server.run import hold

from ..scripts.tiny_file import write_tiny_model
from .serving import wait_until
from .test_gateways import free_port

pytest.importorskip("ray.serve")

PATH = "/v1/completions"
START_S = 180.0
CONTEXT = 2000
REPLICA = "x-martlet-replica"
KEY = {"Authorization": "Bearer a-key"}


class Heard(NamedTuple):
    text: str
    error: str | None
    replica: str


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ray") / "tiny.gguf")


@pytest.fixture(scope="module")
def client(model_file: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "martlet.scripts.cli", "deploy", "ray"]
    command += ["--model", str(model_file), "--replicas", "2", "--context", str(CONTEXT)]
    command += ["--port", str(port), "--kv-bytes", "4M", "--api-key", "a-key"]
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as child:
        assert child.stdout is not None
        try:
            assert f"http://127.0.0.1:{port}/v1" in child.stdout.readline()
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=60, trust_env=False, headers=KEY) as found:
                yield found
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(60)


def body(prompt: str, n: int = 24, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, **others}


def heard(client: httpx.Client, asked: dict[str, Any]) -> Heard:
    text, error = "", None
    with client.stream("POST", PATH, json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["message"]
                else:
                    text += event["choices"][0]["text"]
    return Heard(text, error, answer.headers[REPLICA])


def replica_pids() -> list[int]:
    found = subprocess.run(
        ["pgrep", "-f", "^ray::ServeReplica:martlet:Replica"], capture_output=True, text=True
    )
    return [int(word) for word in found.stdout.split()]


def test_answers_are_those_of_one_engine(client: httpx.Client, model_file: Path) -> None:
    prompts = [f"{n} birds" for n in range(12)]
    model = load_model(model_file, context=CONTEXT, kv_bytes=4 << 20, threads=1)
    held = hold(model, model_name="tiny", options=ServerOptions(hosts=("*",)))
    try:
        alone = [
            json.loads(asyncio.run(ask(held.app, PATH, json.dumps(body(prompt)).encode())).body)
            for prompt in prompts
        ]
    finally:
        held.close()
        model.close()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: heard(client, body(prompt)), prompts))
    assert [answer.text for answer in answers] == [one["choices"][0]["text"] for one in alone]
    assert len({answer.replica for answer in answers}) == 2
    whole = client.post(PATH, json=body(prompts[0])).json()
    assert whole["choices"][0]["text"] == alone[0]["choices"][0]["text"]


def test_refusals_keep_their_form(client: httpx.Client) -> None:
    refused = client.post(PATH, json=body("a", temperature="warm"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"
    json_type = {"Content-Type": "application/json"}
    assert client.post(PATH, content=b"{", headers=json_type).status_code == 400
    assert client.get("/nowhere").status_code == 404
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    stranger = client.post(PATH, json=body("a"), headers={"Authorization": "Bearer other"})
    assert stranger.status_code == 401
    too_long = client.post(PATH, content=b" " * (17 << 20))
    assert too_long.status_code == 413
    assert "16777216 bytes" in too_long.json()["error"]["message"]


def test_a_prompt_returns_to_who_knows_it(client: httpx.Client) -> None:
    for n in range(4):
        prefix = f"{n}. " + "a bird " * 60
        answers = [client.post(PATH, json=body(f"{prefix} {m}", n=2)) for m in range(4)]
        assert len({answer.headers[REPLICA] for answer in answers}) == 1
        cached = [
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers
        ]
        assert min(cached[1:]) > 300


def test_who_leaves_takes_the_request_out(client: httpx.Client) -> None:
    with client.stream("POST", PATH, json=body("a", n=1900, stream=True)) as answer:
        next(answer.iter_lines())

    def is_idle() -> bool:
        stats = [client.get("/stats").json() for _ in range(6)]  # of either
        return not any(each["running"] for each in stats)

    wait_until(is_idle, 20)


def test_a_replica_dies_under_load(client: httpx.Client) -> None:
    prompts = [f"{n} birds fly" for n in range(8)]
    alone = [heard(client, body(prompt, n=1500)) for prompt in prompts]
    before = replica_pids()
    assert len(before) == 2
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(heard, client, body(prompt, n=1500)) for prompt in prompts]
        wait_until(lambda: sum(client.get("/stats").json()["running"] for _ in range(4)) > 0, 20)
        os.kill(before[0], signal.SIGKILL)
        later = [pool.submit(heard, client, body(prompt, n=8)) for prompt in prompts[:4]]
        for answer, expected in zip([each.result() for each in running], alone, strict=True):
            assert expected.text.startswith(answer.text)
            assert answer.error is not None or answer.text == expected.text
            assert answer.error is None or "ask again" in answer.error
        for answer, expected in zip([each.result() for each in later], alone, strict=False):
            assert answer.error is None
            assert expected.text.startswith(answer.text)
    wait_until(lambda: len(replica_pids()) == 2 and before[0] not in replica_pids(), START_S)
