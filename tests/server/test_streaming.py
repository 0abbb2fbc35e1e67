"""Waiting, failing and leaving: pings, dead engines, disconnects in every state."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import assert_refused, assert_works, chat_body, serving, wait_until

PATH = "/v1/chat/completions"


def stream_text(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(PATH, json=chat_body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    return answer.text


def test_b54_comments_only_while_waiting() -> None:
    with serving(ScriptedEngine(prefill_s=0.5), grace_s=0.05, ping_s=0.1) as client:
        text = stream_text(client)
        head, _, rest = text.partition("data: ")
        assert 2 <= head.count(": ping\n\n") <= 5
        assert head.replace(": ping\n\n", "") == ""
        assert ": ping" not in rest
        assert rest.endswith("data: [DONE]\n\n")


def test_b54_no_comments_with_interval_0() -> None:
    with serving(ScriptedEngine(prefill_s=0.3), grace_s=0.05, ping_s=0) as client:
        text = stream_text(client)
        assert ": ping" not in text
        assert text.endswith("data: [DONE]\n\n")


def test_b54_official_client_reads_a_stream_with_pings() -> None:
    with serving(ScriptedEngine(prefill_s=0.3, token_s=0.05), grace_s=0.01, ping_s=0.02) as client:
        official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = official.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "hello"


@pytest.mark.parametrize("ping_s", [0.05, 0])
def test_b54_dead_engine_ends_the_stream_with_an_error(ping_s: float) -> None:
    engine = ScriptedEngine(answers=False)
    with serving(engine, grace_s=0.05, ping_s=ping_s, stall_s=0.3) as client:
        events = [e for e in stream_text(client).split("\n\n") if e.startswith("data: ")]
        assert len(events) == 1
        assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "engine_stalled"
        assert_refused(client.post(PATH, json=chat_body()), 500)
        assert all(request.cancelled.is_set() for request in engine.requests)
        engine.answers = True
        assert_works(client)


def test_a_slow_queue_is_no_dead_engine() -> None:
    """The second request waits longer than the stall limit, while the first makes progress."""
    engine = ScriptedEngine(says("0123456789"), slots=1, token_s=0.1)
    with serving(engine, stall_s=0.4, grace_s=0.05) as client, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(client.post, PATH, json=chat_body()) for _ in range(2)]
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_role_comes_with_the_first_token_not_before() -> None:
    engine = ScriptedEngine(prefill_s=0.4)
    with (
        serving(engine, grace_s=0.01) as client,
        client.stream("POST", PATH, json=chat_body(stream=True)) as answer,
    ):
        assert answer.status_code == 200
        assert engine.requests[0].n_emitted == 0
        first = next(answer.iter_lines())
        assert '"role":"assistant"' in first
        assert engine.requests[0].n_emitted > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_failure_before_the_first_token_is_a_500(is_stream: bool) -> None:
    engine = ScriptedEngine(fail_at=0)
    with serving(engine) as client:
        answer = client.post(PATH, json=chat_body(stream=is_stream))
        error = assert_refused(answer, 500)
        assert (error["type"], error["message"]) == ("server_error", "scripted fault")
        engine.fail_at = None
        assert_works(client)


def test_failure_in_mid_stream_is_an_error_event_that_clients_raise() -> None:
    engine = ScriptedEngine(fail_at=2)
    with serving(engine) as client:
        text = stream_text(client)
        last = text.rstrip("\n").split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "scripted fault"
        assert "[DONE]" not in text
        assert text.count('"error"') == 1
        official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = official.chat.completions.create(model="tiny", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="scripted fault"):
            list(stream)
        assert_refused(client.post(PATH, json=chat_body()), 500)
        engine.fail_at = None
        assert_works(client)


def test_one_failed_choice_ends_the_others() -> None:
    engine = ScriptedEngine(says("x" * 50), token_s=0.02, fail_at=2)
    with serving(engine) as client:
        assert_refused(client.post(PATH, json=chat_body(n=2)), 500)
        wait_until(lambda: engine.n_unfinished == 0)


@contextlib.contextmanager
def raw_post(client: httpx.Client, **fields: Any) -> Iterator[socket.socket]:
    """A request on a plain socket, closed without a word at the end."""
    body = json.dumps(chat_body(**fields)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 10) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        yield connection


@pytest.mark.parametrize("is_stream", [False, True])
def test_leaving_during_decode_cancels(is_stream: bool) -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.01, context=100_000)
    with serving(engine) as client:
        with raw_post(client, stream=is_stream) as connection:
            wait_until(lambda: bool(engine.requests) and engine.requests[0].n_emitted > 3)
            if is_stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: engine.requests[0].reason == "cancelled")
        assert_works(client)


@pytest.mark.parametrize("grace_s", [5.0, 0.05])
@pytest.mark.parametrize("is_stream", [False, True])
def test_b88_leaving_during_prefill_cancels(is_stream: bool, grace_s: float) -> None:
    engine = ScriptedEngine(prefill_s=3)
    with serving(engine, grace_s=grace_s) as client:
        with raw_post(client, stream=is_stream):
            wait_until(lambda: bool(engine.requests) and engine.requests[0].started)
            time.sleep(0.15)  # beyond the short grace, so that the stream is open
        wait_until(lambda: engine.requests[0].reason == "cancelled")
        assert engine.requests[0].n_emitted == 0
        engine.prefill_s = 0
        assert_works(client)


@pytest.mark.parametrize("is_stream", [False, True])
def test_b88_leaving_the_queue_means_never_starting(is_stream: bool) -> None:
    engine = ScriptedEngine(slots=1)
    engine.unpaused.clear()
    with serving(engine, grace_s=0.05) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, PATH, json=chat_body())
        wait_until(lambda: len(engine.requests) == 1)
        with raw_post(client, stream=is_stream):
            wait_until(lambda: len(engine.requests) == 2)
        wait_until(lambda: engine.requests[1].reason == "cancelled")
        engine.unpaused.set()
        assert first.result().status_code == 200
        assert not engine.requests[1].started
        assert_works(client)


def test_b90_cancel_and_ask_again_many_times() -> None:
    engine = ScriptedEngine(says("abcdefgh"), token_s=0.002)
    with serving(engine) as client:
        texts = set()
        for _ in range(20):
            with raw_post(client, stream=True) as connection:
                connection.recv(10)
            answer = client.post(PATH, json=chat_body()).json()
            texts.add(answer["choices"][0]["message"]["content"])
        assert texts == {"abcdefgh"}


def test_health_answers_while_a_prompt_is_prepared() -> None:
    """Templates and tokenizers run beside the event loop."""
    engine = ScriptedEngine()
    entered, release = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode_parts

    def slow(parts: Any) -> list[int]:
        entered.set()
        assert release.wait(10)
        return encode(parts)

    tokenizer: Any = engine.tokenizer
    tokenizer.encode_parts = slow
    with serving(engine) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, PATH, json=chat_body())
        assert entered.wait(10)
        assert client.get("/health").status_code == 200
        release.set()
        assert answer.result().status_code == 200


def test_many_streams_at_once_keep_their_texts_apart() -> None:
    engine = ScriptedEngine(lambda prompt: [*prompt[-40:], 258], token_s=0.001, max_queue=64)
    with serving(engine) as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> bool:
            prompt = f"number {number:03} " * 4
            body = {"prompt": prompt, "stream": True}
            text = client.post("/v1/completions", json=body).text
            chunks = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
            return "".join(c["choices"][0]["text"] for c in chunks) == prompt[-40:]

        assert all(pool.map(ask, range(48)))
