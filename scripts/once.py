"""One answer over HTTP, as a client sees it: starts a server, streams from it, stops it.
Owns reading server-sent events; must not know models or engines. Serves start.py --once."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from martlet.quant.errors import MartletError
from martlet.runtime.latency import rate_per_s
from martlet.scripts.console import note, write_text
from martlet.scripts.figures import figures_line

STOP_S = 10
JSON_TYPE = "application/json"


class OnceError(MartletError):
    """The server did not start, or refused the prompt."""


def answer_once(model: str, prompt: str, max_tokens: int, options: Sequence[str]) -> None:
    with running_server(model, options) as url:
        answer = Answer()
        for event in stream_events(url, request_body(url, prompt, max_tokens)):
            answer.take(event)
    write_text("\n")
    note(figures_line(answer.figures()))


@contextlib.contextmanager
def running_server(model: str, options: Sequence[str]) -> Iterator[str]:
    """The address of its generating route."""
    with serving_process([model], options) as (url, _):
        yield url


@contextlib.contextmanager
def serving_process(
    models: Sequence[str], options: Sequence[str]
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """And the process; the address is found in the curl line it prints when it is ready."""
    command = [sys.executable, "-m", "martlet.scripts.cli", "serve", *models, "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            found = re.search(r"http://[^/\s]+/v1/\S+", child.stdout.readline())
            if not found:
                raise OnceError(f"the server ended with code {child.wait()}; its error is above")
            yield found.group(), child
        finally:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


def request_body(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "max_tokens": max_tokens, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    if url.endswith("/chat/completions"):
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


def stream_events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line until [DONE]."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    with contextlib.closing(connection):
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": JSON_TYPE})
        response = connection.getresponse()
        if response.status != 200:
            raise OnceError(f"the server answered {response.status}: {response.read(400)!r}")
        for line in response:
            data = line.decode("utf-8").removeprefix("data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == "[DONE]":
                return
            yield json.loads(data)


class Answer:
    """Shows text as it comes and keeps what the last chunks say about it."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.finish_reason: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise OnceError(f"the server gave up: {event['error'].get('message')}")
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            write_text(text)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def figures(self) -> dict[str, Any]:
        details = self.usage.get("prompt_tokens_details") or {}
        tpot_ms = self.timings.get("tpot_ms")
        return {
            "ttft_ms": self.timings.get("ttft_ms"),
            "tpot_ms": tpot_ms,
            "tokens_per_s": rate_per_s(1, tpot_ms),
            "n_prompt": self.usage.get("prompt_tokens"),
            "n_cached": details.get("cached_tokens"),
            "n_output": self.usage.get("completion_tokens"),
            "finish_reason": self.finish_reason,
        }
