"""Where `serve` takes its options from, and what it refuses before a model is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from martlet.runtime.work import Speed
from martlet.scripts.cli import app
from typer.testing import CliRunner


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What serve would have served; nothing is loaded."""
    seen: dict[str, Any] = {}

    @contextlib.contextmanager
    def open_model(spec: str, **arguments: Any) -> Iterator[Any]:
        seen.update(arguments, model=spec)
        yield SimpleNamespace()

    def serve(model: Any, *, listener: socket.socket, **arguments: Any) -> None:
        seen.update(arguments, port=listener.getsockname()[1])

    monkeypatch.setattr("martlet.scripts.generate.open_model", open_model)
    monkeypatch.setattr("martlet.server.serve", serve)
    for name in [name for name in os.environ if name.startswith("MARTLET_")]:
        monkeypatch.delenv(name)
    return seen


def run(*words: str, **environ: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words], env=environ)


def assert_refused(result: Any, *words: str) -> None:
    assert result.exit_code in (1, 2), result.output
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_flags_before_environment_before_file(served: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "martlet.toml"
    file.write_text(
        'model = "m.gguf"\nport = 0\nmax-queue = 1\nping_seconds = 2.5\nthreads = 1\n'
        'kv-bytes = "2M"\nmax-body = 1000\norigin = ["http://a", "http://b"]\nlog-requests = true\n'
        'api-key = "only-one"\n'
    )
    environ = {"MARTLET_MAX_QUEUE": "2", "MARTLET_THREADS": "2", "MARTLET_CONFIG": str(file)}
    result = run("--threads", "3", **environ)
    assert result.exit_code == 0, result.output
    options = served["options"]
    assert (served["threads"], served["max_queue"], options.ping_s) == (3, 2, 2.5)
    assert (served["model"], served["kv_bytes"], options.max_body_bytes) == (
        "m.gguf",
        2 << 20,
        1000,
    )
    assert options.origins == ("http://a", "http://b")
    assert options.api_keys == ("only-one",)
    assert options.log is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-que = 1", "do you mean max-queue?"),
        ("port = ", "toml"),
        ("[serve]\nport = 1", "'serve' is no option"),
        ("[port]\nx = 1", "is a table"),
        ('port = "high"', "port"),
        ("port = 70000", "port"),
    ],
)
def test_a_bad_file_is_refused_by_name(
    served: dict[str, Any], tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert_refused(run("m.gguf", "--config", str(file)), told)
    assert not served


def test_the_network_needs_a_key_or_a_word(served: dict[str, Any], tmp_path: Path) -> None:
    """B119: open to everybody by mistake."""
    open_to_all = ("m.gguf", "--port", "0", "--host", "0.0.0.0")
    assert_refused(run(*open_to_all), "--api-key", "--insecure")
    assert not served
    assert run(*open_to_all, "--insecure").exit_code == 0
    assert run(*open_to_all, MARTLET_API_KEY="k").exit_code == 0
    assert served["options"].api_keys == ("k",)
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one \ntwo\n")
    file.chmod(0o600)
    assert run(*open_to_all, "--api-key", "zero", "--api-key-file", str(file)).exit_code == 0
    assert served["options"].api_keys == ("zero", "one", "two")


def test_a_key_file_without_a_key_is_no_key(served: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# later\n")
    assert_refused(run("m.gguf", "--api-key-file", str(file)), "holds no key")
    assert_refused(run("m.gguf", "--api-key-file", str(tmp_path / "absent")))
    assert not served


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_a_key_file_that_others_may_read_is_told(served: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k\n")
    file.chmod(0o644)
    assert "chmod 600" in run("m.gguf", "--port", "0", "--api-key-file", str(file)).stderr
    file.chmod(0o600)
    assert "chmod" not in run("m.gguf", "--port", "0", "--api-key-file", str(file)).stderr


def test_a_taken_port_is_told_before_the_model_is_loaded(served: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("m.gguf", "--port", str(port))
        assert_refused(result, f"port {port}", "another program listens there")
        assert len(result.stderr.strip().splitlines()) == 1
    assert not served


def test_records_are_lines_of_json_on_stderr(
    served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("m.gguf", "--port", "0").exit_code == 0
    assert served["options"].log is None
    assert run("m.gguf", "--port", "0", "--log-prompts").exit_code == 0
    assert served["options"].log_prompts
    served["options"].log({"path": "/x", "text": "a\nb"})
    assert json.loads(capsys.readouterr().err) == {"path": "/x", "text": "a\nb"}


def test_traces_limits_and_spans(
    served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed(3e9, 2e9, 1e9)
    monkeypatch.setattr("martlet.scripts.limits.measure_speed", lambda options: speed)
    trace = tmp_path / "trace.json"
    result = run("m.gguf", "--port", "0", "--trace", str(trace), "--limits")
    assert result.exit_code == 0, result.output
    assert served["trace"].path == trace
    assert served["trace"].is_closed
    assert json.loads(trace.read_bytes())["traceEvents"]
    assert served["limits"] is speed
    assert "int8 3 GMAC/s, read 1.0 GB/s" in result.stderr
    assert served["options"].spans is None
    assert run("m.gguf", "--port", "0").exit_code == 0
    assert served["trace"] is None


def test_spans_are_asked_for(served: dict[str, Any]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert run("m.gguf", "--port", "0", "--otel").exit_code == 0
    assert callable(served["options"].spans)
