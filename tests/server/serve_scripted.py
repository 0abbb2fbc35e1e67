"""A child process for tests: martlet.server.serve over a scripted executor.

Run as `python -m tests.server.serve_scripted`; prints the address when it is ready.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from martlet.server import serve

from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import END, byte_tokenizer


def main() -> None:
    model: Any = SimpleNamespace(
        executor=ScriptedExecutor(lambda history: END if len(history) > 60 else ord("x")),
        tokenizer=byte_tokenizer(),
        context=256,
    )
    serve(model, model_name="tiny", port=0, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
