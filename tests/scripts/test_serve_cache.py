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
from martlet.runtime.errors import UnsupportedError
from martlet.runtime.executors import choice
from martlet.runtime.executors.native_library import Library, NativeUnavailable
from martlet.scripts.serve import check_can_save

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


@pytest.mark.parametrize("executor", ["numba", "reference"])
@pytest.mark.parametrize("also", [(), ("--keep-alive", "9")])
def test_an_executor_that_cannot_save_blocks_is_refused_before_anything_is_made(
    tiny_file: Path, tmp_path: Path, executor: str, also: tuple[str, ...]
) -> None:
    folder = tmp_path / "kv"
    options = (str(tiny_file), "--executor", executor, "--prefix-cache-dir", str(folder), *also)
    done = subprocess.run(
        [*COMMAND, *options, "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"executor {executor} cannot save blocks (asked for): leave" in line
    assert not folder.exists()


def test_what_auto_takes_is_refused_with_why_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> type:
        if name == "native":
            raise NativeUnavailable("no compiled library")
        return object

    monkeypatch.setattr(choice, "executor_class", unavailable)
    with pytest.raises(UnsupportedError, match=r"executor numba cannot .*no compiled library"):
        check_can_save("auto")
