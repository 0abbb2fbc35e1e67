"""Running a server: health, draining, limits, records, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.sampling_params import SamplingParams
from martlet.server import create_app
from martlet.server.bridge import Ask, Job, Patience, SlowReader

from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import ScriptedEngine, byte_tokenizer, says
from .serving import (
    assert_refused,
    assert_works,
    chat_body,
    running_app,
    serving,
    serving_engine,
    wait_until,
)

PATH = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_b79_health_tells_of_a_dead_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def end_the_thread(history: Any) -> int:
        raise SystemExit

    tokenizer = byte_tokenizer()
    engine = Engine(ScriptedExecutor(end_the_thread), tokenizer, context=64)
    app = create_app(engine, tokenizer, model_name="tiny", context=64)
    with running_app(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health").status_code == 503  # not started yet
        engine.start()
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ready"}
        with client.stream("POST", PATH, json=chat_body(stream=True)):
            wait_until(lambda: not engine.is_alive)
        for path in ("/health", "/ready"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert answer.json()["status"] == "dead"
            assert "engine thread has ended" in answer.json()["reason"]
        assert assert_refused(client.post(PATH, json=chat_body()), 503)["code"] == "engine_dead"
        assert client.get("/stats").json()["state"] == "dead"


@pytest.mark.parametrize("is_stream", [True, False])
def test_whoever_waits_for_an_engine_that_dies_is_told_at_once(is_stream: bool) -> None:
    """Without signs of life nobody would ask for minutes whether it is there."""

    def end_the_thread(history: Any) -> int:
        if len(history) > 30:
            raise SystemExit
        return ord("x")

    tokenizer = byte_tokenizer()
    engine = Engine(ScriptedExecutor(end_the_thread), tokenizer, context=64)
    with serving_engine(engine, tokenizer, ping_s=0, timeout_s=10) as client:
        answer = client.post(PATH, json=chat_body(stream=is_stream))
        assert answer.status_code == (200 if is_stream else 500)
        assert "SystemExit" in answer.text
        wait_until(lambda: client.get("/health").status_code == 503)
        assert assert_refused(client.post(PATH, json=chat_body()), 503)["code"] == "engine_dead"


def test_b54_a_stream_ends_when_the_engine_has_died() -> None:
    engine = ScriptedEngine(answers=False)
    with (
        serving(engine, grace_s=0.01, ping_s=0.05) as client,
        client.stream("POST", PATH, json=chat_body(stream=True)) as answer,
    ):
        engine.is_alive = False
        assert "engine thread has ended" in "".join(answer.iter_lines())


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.server.serve_scripted"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_running_answers_finish_while_new_ones_are_refused(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = child
    body = {"prompt": "~", "max_tokens": 30, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as events,
    ):
        lines = events.iter_lines()
        next(lines)
        assert client.get("/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json()["status"] == "draining"
        assert client.get("/health").status_code == 200
        late = client.post("/v1/completions", json={"prompt": "a"})
        assert assert_refused(late, 503)["code"] == "draining"
        assert int(late.headers["retry-after"]) > 0
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(20) in (0, -signal.SIGTERM)


def test_a_full_queue_is_not_ready() -> None:
    engine = ScriptedEngine(slots=1, max_queue=1)
    with serving(engine) as client, ThreadPoolExecutor() as pool:
        engine.unpaused.clear()
        asked = [pool.submit(client.post, PATH, json=chat_body()) for _ in range(2)]
        wait_until(lambda: engine.n_unfinished == 2)
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "full")
        assert "queue is full" in ready.json()["reason"]
        assert ready.headers["retry-after"]
        assert client.get("/stats").json()["state"] == "full"
        assert client.get("/health").status_code == 200
        assert_refused(client.post(PATH, json=chat_body()), 503)
        engine.unpaused.set()
        assert all(each.result().status_code == 200 for each in asked)
        assert client.get("/ready").status_code == 200


def test_one_client_may_ask_for_so_much_at_a_time() -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.01)
    with serving(engine, max_per_client=1, grace_s=0.01) as client:
        with client.stream("POST", PATH, json=chat_body(stream=True)):
            wait_until(lambda: engine.stats().running == 1)
            refusal = client.post(PATH, json=chat_body())
            assert assert_refused(refusal, 429)["type"] == "rate_limit_error"
            assert int(refusal.headers["retry-after"]) > 0
            assert client.get("/v1/models").status_code == 200
        wait_until(lambda: engine.n_unfinished == 0)
        assert_works(client)


@pytest.mark.parametrize("asked", [{}, {"deadline_ms": 60_000}])
def test_no_request_outlives_the_limit_of_the_server(asked: dict[str, int]) -> None:
    seen: list[Any] = []

    class Watched(ScriptedEngine):
        def submit(self, *given: Any, **terms: Any) -> Any:
            seen.append(terms["deadline_ms"])
            return super().submit(*given, **terms)

    with serving(Watched(), max_request_s=2) as client:
        assert client.post(PATH, json=chat_body(**asked)).status_code == 200
        assert client.post(PATH, json=chat_body(deadline_ms=5)).status_code == 200
    assert seen == [2000, 5]


def test_records_tell_sizes_and_times_and_no_text() -> None:
    records: list[dict[str, Any]] = []
    with serving(ScriptedEngine(says("an answer")), log=records.append) as client:
        headers = {"x-request-id": "r-1"}
        client.post(PATH, json=chat_body("a secret question"), headers=headers)
        client.post(PATH, json=chat_body("a secret question", stream=True))
        client.post(PATH, json=chat_body("a secret question", temperature=-1))
        client.get("/health")
        client.get("/nowhere")
        wait_until(lambda: len(records) == 4)
    whole, streamed, bad, lost = records
    assert (whole["request_id"], whole["path"], whole["status"]) == ("r-1", PATH, 200)
    for record in (whole, streamed):
        assert record["finish"] == ["stop"]
        assert record["output_tokens"] == 10
        assert record["prompt_tokens"] > 10
        assert 0 <= record["ttft_ms"] <= record["ms"]
    assert (bad["status"], lost["status"], lost["method"]) == (400, 404, "GET")
    assert "output_tokens" not in bad
    text = json.dumps(records)
    assert "secret" not in text
    assert "an answer" not in text


def test_records_hold_what_was_asked_where_that_is_wanted() -> None:
    records: list[dict[str, Any]] = []
    with serving(ScriptedEngine(), log=records.append, log_prompts=True) as client:
        client.post(PATH, json=chat_body("a secret question"))
        wait_until(lambda: len(records) == 1)
    assert json.loads(records[0]["body"])["messages"][0]["content"] == "a secret question"


def test_a_job_keeps_so_many_events_for_a_slow_reader_and_no_more() -> None:
    engine = ScriptedEngine(says("", end=False), context=200_000)

    async def run() -> None:
        job = Job(engine, "slow", max_unread=50)
        job.submit([Ask([65], SamplingParams())])
        batches = job.batches(Patience(ping_s=0, stall_s=10))
        await batches.__anext__()
        await asyncio.to_thread(wait_until, lambda: engine.n_unfinished == 0)
        with pytest.raises(SlowReader, match="50 events"):
            await batches.__anext__()

    asyncio.run(run())
    assert engine.requests[0].reason == "cancelled"
    assert engine.requests[0].n_emitted < 100_000


def test_a_client_that_stops_reading_ends_its_request_and_no_other() -> None:
    engine = ScriptedEngine(says("", end=False), context=1_000_000)
    engine.script = lambda prompt: [ord("~")] * (900_000 if len(prompt) > 40 else 3)
    with serving(engine, max_unread=200) as client:
        body = json.dumps(chat_body("x" * 50, stream=True)).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", client.base_url.port or 0))
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            wait_until(lambda: bool(engine.requests))
            wait_until(lambda: engine.requests[0].reason == "cancelled", 60)
            assert engine.requests[0].n_emitted < 900_000
            assert_works(client)
