"""A child process for tests: martlet.server.serve over a scripted executor.

Run as `python -m tests.server.serve_scripted`; prints the address when it is ready.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from martlet.runtime.ops import KvType
from martlet.server import serve

from ..runtime.scripted import ScriptedExecutor
from ..runtime.tiny import tiny_model
from .scripted_engine import END, byte_tokenizer


def some_text(history: np.ndarray) -> int:
    """About 60 tokens; slowly, where the prompt begins with a tilde."""
    if history[0] == ord("~"):
        time.sleep(0.1)
    return END if len(history) > 60 else ord("x")


def main() -> None:
    model: Any = SimpleNamespace(
        executor=ScriptedExecutor(some_text),
        tokenizer=byte_tokenizer(),
        context=256,
        adapters=(),
        plan=tiny_model("llama").plan(),  # what /stats counts steps by
        kv_type=KvType.F16,
        timeline=None,
        config=SimpleNamespace(
            arch="llama",
            context_train=256,
            dim=8,
            pooling_type=0,
            nextn=0,
            generates=True,
            abilities={"generate", "embed"},
        ),
        file=SimpleNamespace(tensors={}, n_bytes=0, path=Path(__file__)),
    )
    serve(model, model_name="tiny", port=0, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
