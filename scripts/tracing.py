"""The file that --trace names, open for as long as a command runs.
Owns what a person is told of it; must not know what is in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.scripts.console import note

if TYPE_CHECKING:
    from martlet.runtime.trace_file import TraceFile


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[TraceFile | None]:
    """None without a path. The file is whole JSON at any time, also when the command is killed."""
    if path is None:
        yield None
        return
    from martlet.runtime.trace_file import TraceFile

    file = TraceFile(path)
    try:
        yield file
    finally:
        file.close()
        note(f"trace {path}: open it at https://ui.perfetto.dev")
