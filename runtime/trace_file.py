"""A file of trace events for Perfetto (ui.perfetto.dev) and chrome://tracing.

Owns: the bytes, which are whole JSON after every write, and their bound. Must not know: what the
events are of (timeline.py).

The format is Chrome's "Trace Event Format" in its object form. Times are microseconds of
time.monotonic_ns since the file was opened.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Viewers hold all of a trace in memory."""
FLUSH_BYTES, FLUSH_S = 1 << 18, 0.5
NS_PER_US = 1e3
_END = b"\n]}\n"


class TraceFile:
    """Takes events from any thread. However the process ends, the file ends as JSON does."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.start_ns = time.monotonic_ns()
        self.is_closed = False
        """Nothing is taken any more: closed by hand, full, or not to be written to."""
        self._lock = threading.Lock()
        self._n_processes = 0
        self._pending: list[str] = []
        self._pending_bytes, self._flushed_s = 0, time.monotonic()
        self._file = path.open("wb", buffering=0)
        self._end = 0
        about = {"clock": "time.monotonic_ns", "opened_unix_s": time.time()}
        head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
        first = event(ph="M", pid=0, tid=0, name="process_name", args={"name": "martlet"})
        self._put(f'{head[:-1]}, "traceEvents": [\n{first}'.encode())

    def new_process(self) -> int:
        """A number for what viewers show as a process of its own."""
        with self._lock:
            self._n_processes += 1
            return self._n_processes

    def us(self, time_ns: int) -> float:
        return (time_ns - self.start_ns) / NS_PER_US

    def add(self, events: Sequence[str]) -> None:
        """events: as `event` makes them. A full disk costs the trace, and nothing else."""
        with self._lock:
            if self.is_closed or not events:
                return
            self._pending += events
            self._pending_bytes += sum(map(len, events)) + 2 * len(events)
            try:
                if self._end + self._pending_bytes > self.max_bytes:
                    self._cut()
                elif self._is_due():
                    self._flush()
            except OSError as error:
                log.warning("%s: the trace ends here: %s", self.path, error)
                self._close()

    def close(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._flush()
                self._close()

    def _is_due(self) -> bool:
        if self._pending_bytes > FLUSH_BYTES:
            return True
        return time.monotonic() - self._flushed_s > FLUSH_S

    def _cut(self) -> None:
        log.warning("%s: the trace ends here, at %d bytes", self.path, self._end)
        name = f"the trace ends here: {self.max_bytes} bytes"
        ts = self.us(time.monotonic_ns())
        self._pending = [event(ph="i", s="g", pid=0, tid=0, ts=ts, name=name)]
        self._flush()
        self._close()

    def _close(self) -> None:
        self.is_closed = True
        self._pending = []
        self._file.close()

    def _flush(self) -> None:
        if self._pending:
            self._put("".join(",\n" + each for each in self._pending).encode())
        self._pending, self._pending_bytes = [], 0
        self._flushed_s = time.monotonic()

    def _put(self, data: bytes) -> None:
        """One write over the old end: nothing can come between its bytes and the new end."""
        self._file.seek(self._end)
        self._file.write(data + _END)
        self._end += len(data)


def event(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))
