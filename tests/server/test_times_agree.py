"""The same requests by three clocks: /metrics, the answers' `timings`, and a client outside.

Stamps of the same moments agree exactly, however busy the machine is. What lies between the server
and its client takes time, never less than none, so a client's own figures bound the server's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.model import load_model

from ..scripts.tiny_file import write_tiny_model
from .serving import serving_engine
from .test_metrics import scrape

PATH = "/v1/completions"
N_TOKENS = 24
# histogram -> the figure of `timings` that it adds up, in milliseconds
FIGURES = {
    "martlet_request_queue_seconds": "queue_ms",
    "martlet_request_prefill_seconds": "prefill_ms",
    "martlet_request_decode_seconds": "predicted_ms",
    "martlet_time_to_first_token_seconds": "ttft_ms",
    "martlet_request_time_per_output_token_seconds": "tpot_ms",
    "martlet_e2e_request_latency_seconds": "end_to_end_ms",
}
INTER_TOKEN = "martlet_inter_token_latency_seconds"


@dataclass
class Heard:
    """Seconds since the request was sent, and what the answer says of itself."""

    first_s: float | None = None
    end_s: float = 0.0
    timings: dict[str, Any] = field(default_factory=dict)
    n_output: int = 0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with contextlib.closing(load_model(path, context=128, kv_bytes=1 << 20)) as model:
        engine = Engine(model.executor, model.tokenizer, context=model.context, max_running=4)
        with serving_engine(engine, model.tokenizer) as client:
            yield client


def hear(client: httpx.Client, nth: int, is_stream: bool) -> Heard:
    body = {
        "prompt": f"{nth}: once upon a time",
        "max_tokens": N_TOKENS - nth % 3,
        "seed": nth,
        "ignore_eos": True,
        "stream": is_stream,
    }
    heard, start = Heard(), time.perf_counter()
    if not is_stream:
        answer = client.post(PATH, json=body).json()
        heard.end_s, heard.timings = time.perf_counter() - start, answer["timings"]
        heard.n_output = answer["usage"]["completion_tokens"]
        return heard
    body["stream_options"] = {"include_usage": True}
    with client.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if heard.first_s is None:
                heard.first_s = time.perf_counter() - start
            if event.get("usage"):
                heard.end_s, heard.timings = time.perf_counter() - start, event["timings"]
                heard.n_output = event["usage"]["completion_tokens"]
    return heard


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("n_at_a_time", [1, 8])
def test_metrics_timings_and_a_client_tell_the_same(
    client: httpx.Client, n_at_a_time: int, is_stream: bool
) -> None:
    """Eight at a time are more than may run, so that some queue."""
    label = str(is_stream).lower()
    before = scrape(client)
    with ThreadPoolExecutor(n_at_a_time) as pool:
        answers = list(pool.map(lambda nth: hear(client, nth, is_stream), range(12)))
    after = scrape(client)

    def rise(name: str) -> float:
        return after[(name, label)] - before.get((name, label), 0.0)

    for histogram, figure in FIGURES.items():
        assert rise(f"{histogram}_count") == len(answers)
        told = sum(answer.timings[figure] for answer in answers)
        assert rise(f"{histogram}_sum") * 1e3 == pytest.approx(told, rel=1e-9, abs=1e-6), figure
    # The gaps between tokens fill the decode phase.
    gaps = sum(answer.n_output - 1 for answer in answers)
    decode_ms = sum(answer.timings["predicted_ms"] for answer in answers)
    assert rise(f"{INTER_TOKEN}_count") == gaps
    assert rise(f"{INTER_TOKEN}_sum") * 1e3 == pytest.approx(decode_ms, rel=1e-9, abs=1e-6)
    for answer in answers:
        told = answer.timings
        parts = told["queue_ms"] + told["prefill_ms"] + told["predicted_ms"]
        assert told["end_to_end_ms"] == pytest.approx(parts)
        assert told["ttft_ms"] == pytest.approx(told["queue_ms"] + told["prefill_ms"])
        assert told["predicted_ms"] == pytest.approx(told["tpot_ms"] * (answer.n_output - 1))
        assert answer.end_s * 1e3 >= told["end_to_end_ms"]
        if answer.first_s is not None:
            assert answer.first_s * 1e3 >= told["ttft_ms"]


def test_a_request_arrives_with_its_headers(client: httpx.Client) -> None:
    """Its client waits while the body is on its way, too."""
    late_s = 0.1

    def slow_body() -> Iterator[bytes]:
        yield b'{"prompt": "once",'
        time.sleep(late_s)
        yield b'"max_tokens": 1}'

    headers = {"Content-Type": "application/json"}
    told = client.post(PATH, content=slow_body(), headers=headers).json()["timings"]
    assert told["queue_ms"] >= late_s * 1e3
