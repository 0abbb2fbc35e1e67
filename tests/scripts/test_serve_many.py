"""Which models `serve` offers, under which names; and two real ones behind one server."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from martlet.quant.errors import MartletError
from martlet.scripts.serve_many import models_of


def test_names_and_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("x.gguf", "y-00001-of-00002.gguf", "y-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert list(models_of(["/m/a.gguf"], tmp_path)) == ["a", "x", "y-00001-of-00002"]
    assert models_of([str(tmp_path / "x.gguf")], tmp_path)["x"] == str(tmp_path / "x.gguf")
    with pytest.raises(MartletError, match="both be called x"):
        models_of(["/m/x.gguf"], tmp_path)
    with pytest.raises(MartletError, match=r"no model given, and no --models-dir.*smollm2-135m"):
        models_of([], None)


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_two_models_in_the_memory_of_one(tiny_file: Path, tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        shutil.copy(tiny_file, tmp_path / name)
    command = [sys.executable, "-m", "martlet.scripts.cli", "serve", "--models-dir", str(tmp_path)]
    options = ["--port", "0", "--executor", "reference", "--kv-bytes", "1M", "--context", "64"]
    from martlet.scripts.serve_many import memory_of

    arguments = {"context": 64, "kv_type": "f16", "threads": None, "kv_bytes": 1 << 20}
    arguments |= {"speculate": "auto", "repack": None, "mmap_experts": False}
    limit = ["--max-memory", str(int(memory_of(tiny_file, arguments) * 1.5))]
    with subprocess.Popen([*command, *options, *limit], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout
            base = child.stdout.readline().split()[2].partition("/v1/")[0]
            for name, other in (("two", "one"), ("one", "two")):
                body = {"model": name, "prompt": "hello", "max_tokens": 3}
                assert call(f"{base}/v1/completions", body)["usage"]["completion_tokens"] == 3
                models = call(f"{base}/v1/models")["data"]
                states = {model["id"]: model["status"]["value"] for model in models}
                assert states == {name: "loaded", other: "unloaded"}
            child.send_signal(signal.SIGINT)
            assert child.wait(30) in (0, 130, -signal.SIGINT)
        finally:
            child.kill()
