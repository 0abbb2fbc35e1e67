"""The machine's own limits, measured by the native library: what no kernel here can exceed.

Owns: the buffers of the measurement and their size. Must not know: models, plans, what is compared
with the limits.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ..errors import ModelError
from ..machine import memory
from .native_library import Library

_BUFFER_BYTES = 1 << 30  # well above the caches of most machines
_LEAST_BUFFER_BYTES = 64 << 20
_MEMORY_SHARE = 8  # each of the two buffers takes at most 1/8 of the available memory


class MachineLimits:
    """Threads and buffers for measuring; close it to free them.

    Every figure is per second and over all threads at once; each call takes about `seconds`.
    """

    def __init__(
        self, *, n_threads: int, isa: str | None = None, buffer_bytes: int | None = None
    ) -> None:
        library = Library()
        self._lib: Any = library.lib
        error = library.ffi.new("char[]", self._lib.MT_ERR_BYTES)
        self.buffer_bytes = buffer_bytes or default_buffer_bytes(memory().available_bytes)
        index = library.isa_index(isa)
        self.isa = list(dict(library.isas()))[index]
        self._limits = self._lib.mt_limits_create(index, n_threads, self.buffer_bytes, error)
        if not self._limits:
            raise ModelError(library.ffi.string(error).decode(errors="replace"))

    def int8_macs(self, seconds: float) -> float:
        """Multiply-adds of u8 x s8 by the ISA's own dot product."""
        return self._measure(self._lib.MT_LIMIT_INT8, seconds)

    def f32_macs(self, seconds: float) -> float:
        return self._measure(self._lib.MT_LIMIT_F32, seconds)

    def read_bytes(
        self, seconds: float, *, span_bytes: int = 0, small_pages: bool = False
    ) -> float:
        """Bytes read in order, each thread its own part of a span (0: the whole buffer)."""
        small = self._lib.MT_LIMIT_READ_SMALL_PAGES
        return self._measure(small if small_pages else self._lib.MT_LIMIT_READ, seconds, span_bytes)

    def close(self) -> None:
        if self._limits:
            self._lib.mt_limits_free(self._limits)
            self._limits = None

    def __enter__(self) -> MachineLimits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _measure(self, kind: int, seconds: float, span_bytes: int = 0) -> float:
        if not self._limits:
            raise ModelError("the measurement of limits is closed")
        return float(self._lib.mt_limits_measure(self._limits, kind, span_bytes, seconds))


def default_buffer_bytes(available_bytes: int) -> int:
    return max(_LEAST_BUFFER_BYTES, min(_BUFFER_BYTES, available_bytes // _MEMORY_SHARE))
