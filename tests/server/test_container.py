"""The recipes for containers: martlet does what the manifest asks for, on a root that cannot be
written, without privileges."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import martlet
import pytest
import yaml  # type: ignore[import-untyped]

from ..scripts.tiny_file import write_tiny_model
from .serving import wait_until
from .test_gateways import free_port

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
KEY = "a-key-of-this-test"
MOUNTS = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/models && mount --bind "$1" /mnt/models && mount -o remount,bind,ro /mnt/models
mount -t tmpfs tmpfs /tmp && mkdir -m 1777 /tmp/own
mount -o remount,bind,ro /
shift
exec "$@"
"""


@pytest.fixture(scope="module")
def deployment() -> dict[str, Any]:
    found, _ = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def can_mount() -> bool:
    words = ["unshare", "--mount", "--propagation=private", "mount", "-t", "tmpfs", "none", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True).returncode == 0
    return False


def user() -> list[str]:
    """Somebody else, where the interpreter is open to all; else root without its privileges."""
    base = Path(sys.executable).resolve().parents
    is_open = all(path.stat().st_mode & 0o005 == 0o005 for path in base if path.exists())
    who = ["--reuid=10001", "--regid=10001", "--clear-groups"] if is_open else []
    return ["setpriv", *who, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture
def server(
    deployment: dict[str, Any], tmp_path: Path
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """As the manifest starts it, but for its port and for where the model and the key are."""
    if not (can_mount() and shutil.which("setpriv")):
        pytest.skip("no mount namespaces of one's own here")
    if any(Path(path).is_relative_to("/tmp") for path in (sys.prefix, martlet.__path__[0])):
        pytest.skip("martlet is installed in /tmp, which the server gets anew")
    write_tiny_model(tmp_path / "model.gguf")
    (tmp_path / "key").write_text(KEY + "\n")
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o755)
    port = free_port()
    (container,) = deployment["containers"]
    places = {
        "/models/": "/mnt/models/",
        "/run/secrets/martlet/": "/mnt/models/",
        "8080": str(port),
    }
    arguments = []
    for argument in container["args"]:
        for before, after in places.items():
            argument = argument.replace(before, after)
        arguments.append(argument)
    arguments = [each.replace("4096", "128") for each in arguments]  # what the tiny model has
    words = ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", str(tmp_path), *user()]
    words += [sys.executable, "-m", "martlet.scripts.cli", *arguments]
    environ = {
        **os.environ,
        "HOME": "/nowhere",
        "TMPDIR": "/tmp/own",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    with subprocess.Popen(words, cwd="/", env=environ) as child:
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
                wait_until(lambda: status(client, "/ready") == 200 or child.poll() is not None, 60)
                yield client, child
        finally:
            child.kill()


def status(client: httpx.Client, path: str) -> int | None:
    with contextlib.suppress(httpx.TransportError):
        return client.get(path).status_code
    return None


def test_it_serves_from_a_root_that_cannot_be_written(
    server: tuple[httpx.Client, subprocess.Popen[bytes]],
) -> None:
    client, child = server
    assert status(client, "/health") == 200
    body = {"prompt": "a", "max_tokens": 3}
    assert client.post("/v1/completions", json=body).status_code == 200
    without = {"Authorization": ""}
    assert client.post("/v1/completions", json=body, headers=without).status_code == 401
    assert "vllm:num_requests_running" in client.get("/metrics").text
    root = Path(f"/proc/{child.pid}")
    assert "\nNoNewPrivs:\t1" in (root / "status").read_text()
    assert "CapEff:\t0000000000000000" in (root / "status").read_text()
    mounts = [line.split() for line in (root / "mounts").read_text().splitlines()]
    assert next(options for _, where, _, options, *_ in mounts if where == "/").startswith("ro")


def test_it_stops_as_the_manifest_expects(
    deployment: dict[str, Any], server: tuple[httpx.Client, subprocess.Popen[bytes]]
) -> None:
    client, child = server
    body = {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    assert text.rstrip().endswith("data: [DONE]")
    # By the signal that asked for it; the first process of a container ignores that and returns 0.
    assert child.wait(30) in (0, -signal.SIGTERM)
    (container,) = deployment["containers"]
    drain = next(arg for arg in container["args"] if arg.startswith("--drain-seconds="))
    assert deployment["terminationGracePeriodSeconds"] > float(drain.partition("=")[2]) + 10


def test_probes_ask_for_what_is_there(deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    asked = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert asked == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }


def test_the_image_has_no_shell_before_martlet() -> None:
    lines = (RECIPES / "Containerfile").read_text().splitlines()
    assert 'ENTRYPOINT ["martlet"]' in lines
    assert "USER 10001:10001" in lines
