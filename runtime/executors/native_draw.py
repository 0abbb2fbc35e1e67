"""Draws tokens by the native library: one call does what runtime/sampling.py does with NumPy.

Owns: the calls and their scratch memory. Must not know: plans, steps, who asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..constraint import WORD_BITS, Allowed
from ..sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]


class NativeDrawer:
    """Weights are computed by the kernels of one ISA; all of them give the same bits."""

    def __init__(self, ffi: Any, lib: Any, isa_index: int) -> None:
        self._ffi, self._lib, self._isa_index = ffi, lib, isa_index
        self._terms = ffi.new("mt_draw_terms *")
        self._scratch = np.empty(0, np.float64)

    def __call__(
        self,
        logits: Logits,
        best: float,
        params: SamplingParams,
        uniform: float,
        allowed: Allowed | None = None,
    ) -> int:
        """logits (n,) contiguous, without NaN; best: the largest of those allowed, finite."""
        n, terms = len(logits), self._terms
        n_bytes = self._lib.mt_draw_bytes(n)
        if self._scratch.nbytes < n_bytes:
            self._scratch = np.empty(-(-n_bytes // 8), np.float64)
        terms.top_p, terms.min_p, terms.uniform = params.top_p, params.min_p, uniform
        terms.best, terms.temperature = best, params.temperature
        terms.allowed = self._ffi.NULL if allowed is None else self._words(allowed, n)
        pointer = self._ffi.from_buffer("float[]", logits)
        scratch = self._ffi.from_buffer(self._scratch)
        place = int(self._lib.mt_draw(self._isa_index, pointer, n, terms, scratch))
        assert place >= 0, "refused by the library"
        return place

    def best(self, logits: Logits, allowed: Allowed) -> int | None:
        """The first of the best that are allowed; None where nothing is left to choose."""
        pointer, n = self._ffi.from_buffer("float[]", logits), len(logits)
        words = self._words(allowed, n)
        place = int(self._lib.mt_mask(pointer, n, words, self._ffi.NULL))
        return None if place < 0 else place

    def mask(self, logits: Logits, allowed: Allowed) -> Logits:
        """A copy, -inf where a token is not allowed."""
        kept, n = np.empty_like(logits), len(logits)
        pointer, out = (self._ffi.from_buffer("float[]", a) for a in (logits, kept))
        self._lib.mt_mask(pointer, n, self._words(allowed, n), out)
        return kept

    def _words(self, allowed: Allowed, n: int) -> Any:
        """A pointer that lives as long as the array."""
        assert allowed.dtype == np.uint32, allowed.dtype
        assert len(allowed) * WORD_BITS >= n, f"{len(allowed)} words of a mask for {n} logits"
        return self._ffi.cast("uint32_t *", allowed.ctypes.data)

    def weights(self, n: int) -> npt.NDArray[np.float32]:
        """Of the n logits that were last drawn from. For tests."""
        n_runs = (self._lib.mt_draw_bytes(n) - 8 * n) // 8
        return self._scratch[n_runs:].view(np.float32)[:n].copy()
