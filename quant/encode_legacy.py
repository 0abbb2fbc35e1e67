"""Kernels that fit blocks with one scale, or a scale and an offset: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
IQ4_NL.

Owns: what is done about the rounding of scale and offset to half floats. Must not know: bytes,
files, threads. Called through the table in `grid.py`; its signature is described there. Blocks
that the format can hold exactly are not fitted but recognised, see `encode_lattice.py`.

Formats share kernels: what differs are numbers they are given. Only what decides whether loops
become vectors is constant in a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .encode_lattice import lattice_step, lattice_with_offset
from .encode_math import (
    LARGEST,
    ZERO,
    F,
    error_at,
    fit_offset,
    fit_step,
    half,
    inverse,
    kernel,
    store_indices,
    sums_at,
)

N = 32
_NEAR = F(2.0**-11)  # half floats lie this far apart, relatively


def symmetric(is_table: bool) -> Any:
    @kernel
    def fit_symmetric(
        x: Any,
        w: Any,
        d: Any,
        q: Any,
        low: Any,
        top: Any,
        first: Any,
        stride: Any,
        tries: int,
        fewest: int,
    ) -> None:
        bits = x.view(np.int32)
        for b in range(x.shape[0]):
            xb, wb = x[b], w[b % w.shape[0]]
            step = fit_step(xb, wb, N, low, top, is_table, first, stride, tries)
            least, best = LARGEST, ZERO
            for k in range(-1, 2):  # the half floats on both sides of the best step, and one beyond
                rounded = half(step * (F(1) + F(k) * _NEAR))
                error = error_at(xb, wb, N, rounded, ZERO, low, top, is_table)
                if error < least:
                    least, best = error, rounded
            exact = lattice_step(xb, bits[b], N, step, low, top, is_table, fewest)
            best = exact if exact != ZERO else best
            d[b] = best
            store_indices(q[b], xb, N, best, ZERO, low, top, is_table)

    return fit_symmetric


@kernel
def fit_affine(
    x: Any, w: Any, d: Any, m: Any, q: Any, top: Any, first: Any, stride: Any, tries: int,
    shift: Any, shifts: int,
) -> None:  # fmt: skip
    bits = x.view(np.int32)
    for b in range(x.shape[0]):
        xb, wb = x[b], w[b % w.shape[0]]
        step, offset = fit_offset(xb, wb, N, top, False, first, stride, tries, shift, shifts)
        sw, sx = ZERO, ZERO
        for i in range(N):
            sw += wb[i]
            sx += wb[i] * xb[i]
        least, best_step, best_offset = LARGEST, ZERO, ZERO
        for k in range(-1, 2):
            # The offset makes up for what rounding did to the step.
            rounded = half(step * (F(1) + F(k) * _NEAR))
            sq, _, _ = sums_at(xb, wb, N, inverse(rounded), offset, ZERO, top, False)
            low = half((sx - rounded * sq) / sw)
            error = error_at(xb, wb, N, rounded, low, ZERO, top, False)
            if error < least:
                least, best_step, best_offset = error, rounded, low
        exact, low = lattice_with_offset(xb, bits[b], N, top)
        if exact != ZERO:
            best_step, best_offset = exact, low
        d[b] = best_step
        m[b] = best_offset
        store_indices(q[b], xb, N, best_step, best_offset, ZERO, top, False)


_fit_levels, _fit_table = symmetric(is_table=False), symmetric(is_table=True)


def fit_q4_0(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_levels(x, w, d, q, F(-8), F(7), F(5), F(0.25), 32, 9)


def fit_q5_0(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_levels(x, w, d, q, F(-16), F(15), F(13), F(0.5), 24, 17)


def fit_q8_0(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_levels(x, w, d, q, F(-127), F(127), F(125), F(0.5), 28, 127)


def fit_q4_1(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    fit_affine(x, w, d, m, q, F(15), F(12), F(0.25), 28, F(0.5), 2)


def fit_q5_1(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    fit_affine(x, w, d, m, q, F(31), F(28), F(0.5), 22, F(0.5), 2)


def fit_iq4_nl(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_table(x, w, d, q, ZERO, ZERO, F(89), F(4), 26, 1)
