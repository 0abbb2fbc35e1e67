"""The server over the real Engine (and a scripted executor), and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.errors import MartletError
from martlet.server.run import open_socket

from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import VOCAB_SIZE, byte_tokenizer
from .serving import assert_refused, serving_engine, wait_until

ROOT = Path(__file__).parents[2]
PATH = "/v1/completions"


def mostly_five(history: np.ndarray) -> np.ndarray:
    """Token 5 is the likeliest, then 6; 7 … 9 could be drawn too."""
    logits = np.full(VOCAB_SIZE, -50, np.float32)
    logits[5:10] = (3, 2, 1.5, 1.5, 1.5)
    return logits


@contextlib.contextmanager
def engine_serving(**engine_options: Any) -> Iterator[httpx.Client]:
    executor, tokenizer = ScriptedExecutor(mostly_five), byte_tokenizer()
    engine = Engine(executor, tokenizer, context=64, **engine_options)
    with serving_engine(engine, tokenizer) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with engine_serving() as client:
        yield client


def text_of(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(PATH, json={"prompt": "a", "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_b74_bias_has_its_effect(client: httpx.Client) -> None:
    assert text_of(client, temperature=0) == "\x05" * 8
    assert text_of(client, temperature=0, logit_bias={"5": -100}) == "\x06" * 8
    assert text_of(client, temperature=0, logit_bias={"9": 100}) == "\x09" * 8
    for bad in ({"x": 1}, {"999999": 1}, {"5": 101}):
        assert_refused(client.post(PATH, json={"prompt": "a", "logit_bias": bad}))


def test_b82_b84_context_rule(client: httpx.Client) -> None:
    for n_prompt, limit, expected in ((62, 10, 2), (63, 10, 1), (50, None, 14), (50, 1000, 14)):
        body = {"prompt": [97] * n_prompt, "max_tokens": limit}
        answer = client.post(PATH, json=body).json()
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"
    error = assert_refused(client.post(PATH, json={"prompt": [97] * 64}))
    assert error["code"] == "context_length_exceeded"
    assert "64" in error["message"]


def test_b108_the_reported_seed_reproduces_the_text(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 30}
    [choice] = client.post(PATH, json=body).json()["choices"]
    assert text_of(client, seed=choice["seed"], max_tokens=30) == choice["text"]
    for seed in (0, 2**32 - 1, 2**63 - 1):
        assert text_of(client, seed=seed) == text_of(client, seed=seed)
    assert_refused(client.post(PATH, json={**body, "seed": -1}))


def test_streamed_text_equals_the_whole(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 30, "seed": 3, "n": 2}
    whole = [c["text"] for c in client.post(PATH, json=body).json()["choices"]]
    assert whole[0] != whole[1]
    raw = client.post(PATH, json={**body, "stream": True}).text
    streamed = ["", ""]
    for event in raw.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event[6:])["choices"]:
                streamed[choice["index"]] += choice["text"]
    assert streamed == whole


def test_second_turn_reports_cached_tokens(client: httpx.Client) -> None:
    body = {"prompt": [ord("q")] * 40, "max_tokens": 1}
    client.post(PATH, json=body)
    answer = client.post(PATH, json=body).json()
    n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_cached == 32  # whole blocks of 16 before the last prompt token
    assert answer["timings"]["cache_n"] == 32
    assert answer["timings"]["prompt_n"] == 8
    assert answer["usage"]["prompt_tokens"] == 40


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "tests.server.serve_scripted"]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), process.stdout.readline().strip()
        finally:
            process.kill()


def test_process_says_ready_serves_and_ends_on_interrupt(child: tuple[psutil.Process, str]) -> None:
    process, url = child
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_running_answers_in_words(
    child: tuple[psutil.Process, str], tmp_path: Path, sent: signal.Signals
) -> None:
    process, url = child
    body = {"prompt": "~", "ignore_eos": True}
    with (
        httpx.Client(timeout=30, trust_env=False) as client,
        client.stream("POST", f"{url}{PATH}", json={**body, "stream": True}) as events,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = events.iter_lines()
        next(lines)
        whole = pool.submit(httpx.post, f"{url}{PATH}", json=body, timeout=30, trust_env=False)
        running = 'martlet_requests_running{model_name="tiny"} 2.0'
        wait_until(lambda: running in client.get(f"{url}/metrics").text)
        process.send_signal(sent)
        time.sleep(0.5)  # answers go on; the server has heard the first signal by then
        process.send_signal(sent)
        assert "generation was cancelled by the server" in "".join(lines)
        error = assert_refused(whole.result(), 500)
    assert error["type"] == "server_error"
    assert process.wait(20) in (0, -sent)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_b116_idle_process_uses_no_cpu(child: tuple[psutil.Process, str]) -> None:
    process, url = child
    httpx.post(f"{url}{PATH}", json={"prompt": "a"}, trust_env=False)
    time.sleep(0.5)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_accepted_connections_send_small_writes_at_once() -> None:
    """Two writes without a read between them are what Nagle's algorithm would hold back."""
    seen: list[int] = []

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def run() -> None:
        with open_socket("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(look, sock=listener)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()
            server.close()

    asyncio.run(run())
    assert seen
    assert all(seen)


def test_taken_port_is_a_typed_error_with_a_next_step() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MartletError, match=f"port {port}.*choose another"):
            open_socket("127.0.0.1", port)
    with pytest.raises(MartletError):
        open_socket("127.0.0.1", 99999)
