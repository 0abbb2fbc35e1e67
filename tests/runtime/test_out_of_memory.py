"""A process whose memory is limited: what does not fit is refused, and what comes after works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..recorded import gguf_of
from .native_library import IS_SANITIZED

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or IS_SANITIZED,
    reason="the system limits no addresses, or a sanitizer needs them all",
)

LIMITED = """
import contextlib, json, logging, resource, sys
from pathlib import Path
import httpx
from martlet.runtime.model import load_model
from tests.server.scripted_engine import ScriptedEngine
from tests.server.serving import assert_works, chat_body, serving

logging.disable()

def held_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

@contextlib.contextmanager
def limited(more_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes() + more_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

def load(**how):
    load_model(sys.argv[1], **{"executor": "native", "context": 64, "threads": 1, **how}).close()

found = {}
load(kv_bytes=1 << 20)
for name, how in {
    "pool": {"kv_bytes": 256 << 20},
    "threads": {"kv_bytes": 1 << 20, "threads": 200},
}.items():
    with limited(48 << 20):
        try:
            load(**how)
            found[name] = "fits"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    load(**how)  # with memory it is none of its faults

with serving(ScriptedEngine()) as client:
    assert_works(client)
    body = chat_body("x" * (12 << 20))
    with limited(16 << 20):
        try:
            found["body"] = str(client.post("/v1/chat/completions", json=body).status_code)
        except (httpx.TransportError, MemoryError) as error:  # the client has no more than it
            found["body"] = type(error).__name__
    assert_works(client)
print(json.dumps(found))
"""


def test_what_has_no_memory_is_refused_and_the_next_one_works() -> None:
    command = [sys.executable, "-c", LIMITED, str(gguf_of("llama"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("pool", "threads"):
        assert found[name].startswith("ModelError: "), found
        assert "\n" not in found[name]
    assert found["body"] != "200"
