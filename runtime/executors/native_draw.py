"""Draws tokens by the native library: one call does what runtime/sampling.py does with NumPy.

Owns: the call and its scratch memory. Must not know: plans, steps, who asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams


class NativeDrawer:
    """Weights are computed by the kernels of one ISA; all of them give the same bits."""

    def __init__(self, ffi: Any, lib: Any, isa_index: int) -> None:
        self._ffi, self._lib, self._isa_index = ffi, lib, isa_index
        self._terms = ffi.new("mt_draw_terms *")
        self._scratch = np.empty(0, np.float64)

    def __call__(
        self, logits: npt.NDArray[np.float32], best: float, params: SamplingParams, uniform: float
    ) -> int:
        """logits (n,) contiguous, without NaN; best: the largest of them, finite."""
        n, terms = len(logits), self._terms
        n_bytes = self._lib.mt_draw_bytes(n)
        if self._scratch.nbytes < n_bytes:
            self._scratch = np.empty(-(-n_bytes // 8), np.float64)
        terms.top_p, terms.min_p, terms.uniform = params.top_p, params.min_p, uniform
        terms.best, terms.temperature = best, params.temperature
        pointer = self._ffi.from_buffer("float[]", logits)
        scratch = self._ffi.from_buffer(self._scratch)
        place = int(self._lib.mt_draw(self._isa_index, pointer, n, terms, scratch))
        assert place >= 0, "refused by the library"
        return place

    def weights(self, n: int) -> npt.NDArray[np.float32]:
        """Of the n logits that were last drawn from. For tests."""
        n_runs = (self._lib.mt_draw_bytes(n) - 8 * n) // 8
        return self._scratch[n_runs:].view(np.float32)[:n].copy()
