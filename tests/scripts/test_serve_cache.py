"""A server that was stopped and started again answers a known prompt from its folder."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from martlet.runtime.executors.native import Library, NativeUnavailable

try:
    Library()
except NativeUnavailable as error:
    pytest.skip(f"native library: {error}", allow_module_level=True)

COMMAND = [sys.executable, "-m", "martlet.scripts.cli", "serve"]


@contextmanager
def server(*arguments: str, stop: signal.Signals) -> Iterator[str]:
    """The address of its first route; stopped by this signal at the end."""
    with subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        try:
            yield next(w for w in child.stdout.readline().split() if w.startswith("http"))
        finally:
            child.send_signal(stop)
            child.wait(60)


def ask(url: str) -> dict:
    body = {"prompt": list(range(3, 103)), "max_tokens": 4, "temperature": 0}
    at = url.split("/v1/")[0] + "/v1/completions"
    request = urllib.request.Request(
        at, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict = json.load(response)
    return answer


@pytest.mark.skipif(os.name == "nt", reason="stops the server by a signal")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_restarted_server_knows_its_prompts(
    tiny_file: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    options = (str(tiny_file), "--executor", "native", "--prefix-cache-dir", str(tmp_path / "kv"))
    answers = []
    for _ in range(2):
        with server(*options, stop=stop) as url:
            answers.append(ask(url))
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 96]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_an_executor_that_cannot_save_blocks_is_one_line(tiny_file: Path, tmp_path: Path) -> None:
    options = (str(tiny_file), "--executor", "reference", "--prefix-cache-dir", str(tmp_path))
    done = subprocess.run(
        [*COMMAND, *options, "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "executor reference cannot save blocks" in done.stderr.splitlines()[-1]
