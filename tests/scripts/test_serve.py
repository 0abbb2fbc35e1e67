"""`serve` and `start.py --once` against a real server process on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from martlet.scripts.once import Answer, OnceError, answer_once, request_body, running_server
from martlet.scripts.serve import curl_line
from martlet.scripts.serve_many import served_name

from .tiny_file import write_tiny_model

REFERENCE = ("--executor", "reference")


@pytest.fixture
def server(tiny_file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "martlet.scripts.cli", "serve", str(tiny_file)]
    with subprocess.Popen(
        [*command, "--port", "0", *REFERENCE], stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.kill()


@pytest.mark.skipif(os.name == "nt", reason="runs the printed line in a POSIX shell")
def test_the_printed_curl_line_asks_a_question_that_is_answered(
    server: subprocess.Popen[str],
) -> None:
    import shlex

    assert server.stdout
    words = shlex.split(server.stdout.readline())
    assert words[:2] == ["curl", "-N"]
    body = words[words.index("-d") + 1].encode()
    request = urllib.request.Request(words[2], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().splitlines()
    assert lines[-2] == "data: [DONE]"
    server.send_signal(signal.SIGINT)
    assert server.wait(30) in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize("template", ["with", "without"])
def test_once_shows_text_and_figures(
    template: str, tiny_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_file
    if template == "without":
        path = write_tiny_model(tmp_path / "base.gguf", template=None)
    answer_once(str(path), "hello", 5, REFERENCE)
    shown = capsys.readouterr()
    assert len(shown.out) > 1
    assert "+ 5 output tokens · end: length" in shown.err
    assert "ttft -" not in shown.err


def test_once_fails_when_the_server_does() -> None:
    with pytest.raises(OnceError, match="ended with code 1"), running_server("absent", ()):
        pass


def test_an_error_in_the_stream_is_told() -> None:
    with pytest.raises(OnceError, match="out of luck"):
        Answer().take({"error": {"message": "out of luck"}})


def test_the_route_decides_the_body() -> None:
    chat = request_body("http://h/v1/chat/completions", "hi", 3)
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert request_body("http://h/v1/completions", "hi", 3)["prompt"] == "hi"
    assert json.dumps(chat)


def test_a_key_shows_in_the_curl_line() -> None:
    assert "Bearer YOUR_KEY" in curl_line("m", "http://h", True, True)
    assert "Bearer" not in curl_line("m", "http://h", True, False)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/x/My-Model.Q4_K_M.gguf", "My-Model.Q4_K_M"),
        ("hf:me/repo/m.gguf", "m"),
    ],
)
def test_the_name_requests_use(spec: str, name: str) -> None:
    assert served_name(spec) == name
