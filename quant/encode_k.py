"""Kernels that fit super-blocks of 256 weights, whose sub-blocks have integer scales: Q2_K … Q6_K,
IQ4_XS.

Owns: the choice of the super-block's half floats and of the integer scales under them. Must not
know: bytes, files, threads. Called through the table in `grid.py`; its signature is described
there. Row b·(256/n) + j of x, w and q is sub-block j of super-block b.

First every sub-block gets the step (and offset) it would like. Then, in rounds: each sub-block
takes the best integers near to those, its weights rounded anew for each; with all integers fixed
the half floats are a linear least-squares problem again; these are rounded, and the next round
starts from them. The best state seen is kept.

Weights that were decoded from the very format get back their half floats: where all steps (and
offsets) wished for are whole multiples of one number, that is tried, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .encode_math import (
    HALF,
    LARGEST,
    ZERO,
    F,
    error_at,
    fit_offset,
    fit_step,
    half,
    helper,
    inverse,
    kernel,
    store_indices,
    sums_at,
)

_MOST_SUBS = 16
_NEAR = F(1 / 16)  # so far from a whole number is a multiple that counts as none


@helper
def clipped(value: Any, low: int, high: int) -> int:
    whole = int(np.rint(value))
    return min(max(whole, low), high)


@helper
def misfit_of(v: Any) -> Any:
    """The squared distance from v ≥ 0 to a whole number, up to that of one that counts as none."""
    rest = v - F(np.int32(v + HALF))
    return min(rest * rest, _NEAR * _NEAR)


@helper
def common_divisor(wished: Any, n: int, most: int) -> Any:
    """The half float that nearly all of float32 (n,) are whole multiples of, the largest of them at
    most the `most`-th; the finest there is, and 0 where there is none."""
    widest = ZERO
    for j in range(n):
        widest = max(widest, abs(wished[j]))
    if widest == ZERO:
        return ZERO
    best, found = F(n) * _NEAR * _NEAR / F(4), ZERO
    for t in range(most, 0, -1):
        # As it is stored: of a divisor's fractions the right one is a half float.
        divisor, misfit = half(widest / F(t)), ZERO
        if divisor == ZERO:
            continue
        scale = inverse(divisor)
        for j in range(n):
            misfit += misfit_of(abs(wished[j]) * scale)
        if misfit < best:
            best, found = misfit, divisor
    return found


@helper
def common_offset(offsets: Any, steps: Any, n: int, most: int) -> Any:
    """As `common_divisor` for offsets; these are changed by a step where that brings them nearer.

    A sub-block that does not use all levels may count its own from one further up or down.
    """
    best, found = F(n) * _NEAR * _NEAR, ZERO
    for one in range(n):
        for t in range(most if offsets[one] < ZERO else 0, 0, -1):
            scale, misfit = -F(t) / offsets[one], ZERO
            for j in range(n):
                v, shift = -offsets[j] * scale, steps[j] * scale
                least = min(misfit_of(max(v, ZERO)), misfit_of(v + shift))
                misfit += min(least, misfit_of(v - shift)) if v > shift else least
            if misfit < best:
                best, found = misfit, -offsets[one] / F(t)
    if found > ZERO:
        for j in range(n):
            v, shift = -offsets[j] / found, steps[j] / found
            if misfit_of(v + shift) < misfit_of(max(v, ZERO)):
                offsets[j] -= steps[j]
            elif v > shift and misfit_of(v - shift) < misfit_of(v):
                offsets[j] += steps[j]
    return found


def scaled(n: int, is_table: bool) -> Any:
    @kernel
    def fit_scaled(
        x: Any, w: Any, d: Any, s: Any, q: Any, low: Any, top: Any,
        first: Any, stride: Any, tries: int, least_s: int, most_s: int, reach: int, rounds: int,
    ) -> None:  # fmt: skip
        """w = d·s·level: one half float, signed sub-scales of least_s … most_s."""
        subs = 256 // n
        wished = np.empty(_MOST_SUBS, np.float32)
        trial = np.empty(_MOST_SUBS, np.int64)
        for b in range(d.shape[0]):
            widest = ZERO
            for j in range(subs):
                r = b * subs + j
                step = fit_step(
                    x[r], w[r % w.shape[0]], n, low, top, is_table, first, stride, tries
                )
                wished[j] = step
                widest = step if abs(step) > abs(widest) else widest
            best_error, best_d = LARGEST, ZERO
            for j in range(subs):
                s[b, j] = 0
            divisor = common_divisor(wished, subs, -least_s)
            if widest > (F(most_s) + HALF) * divisor:
                divisor = -divisor  # the lower end of s reaches one further
            # The widest step at the lower and at the upper end of s, and what they have in common.
            for start in range(2 if divisor == ZERO else 3):
                now = half(divisor if start == 2 else widest / F(least_s if start == 0 else most_s))
                for j in range(subs):
                    trial[j] = clipped(wished[j] * inverse(now), least_s, most_s)
                for _ in range(rounds):
                    total, rr, rx = ZERO, ZERO, ZERO
                    for j in range(subs):
                        r = b * subs + j
                        xr, wr = x[r], w[r % w.shape[0]]
                        least, chosen = LARGEST, 0
                        for t in range(trial[j] - reach, trial[j] + reach + 1):
                            if least_s <= t <= most_s:
                                error = error_at(xr, wr, n, now * F(t), ZERO, low, top, is_table)
                                if error < least:
                                    least, chosen = error, t
                        trial[j] = chosen
                        total += least
                        step = now * F(chosen)
                        _, sqq, sxq = sums_at(xr, wr, n, inverse(step), ZERO, low, top, is_table)
                        rr += F(chosen * chosen) * sqq
                        rx += F(chosen) * sxq
                    if total < best_error:
                        best_error, best_d = total, now
                        for j in range(subs):
                            s[b, j] = trial[j]
                    if not rr > ZERO:
                        break
                    following = half(rx / rr)
                    if following == now:
                        break
                    now = following
            d[b] = best_d
            for j in range(subs):
                r = b * subs + j
                store_indices(q[r], x[r], n, best_d * F(s[b, j]), ZERO, low, top, is_table)

    return fit_scaled


def scaled_offset(n: int) -> Any:
    @kernel
    def fit_scaled_offset(
        x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any, top: Any, first: Any,
        stride: Any, tries: int, shift: Any, shifts: int, most: int, reach: int, reach_o: int,
        rounds: int,
    ) -> None:  # fmt: skip
        """w = d·s·level - m·o: two half floats, sub-scales and sub-minimums of 0 … most."""
        subs = 256 // n
        steps = np.empty(_MOST_SUBS, np.float32)
        offsets = np.empty(_MOST_SUBS, np.float32)
        sums_w = np.empty(_MOST_SUBS, np.float32)
        sums_x = np.empty(_MOST_SUBS, np.float32)
        trial_s = np.empty(_MOST_SUBS, np.int64)
        trial_o = np.empty(_MOST_SUBS, np.int64)
        for b in range(d.shape[0]):
            widest, deepest = ZERO, ZERO
            for j in range(subs):
                r = b * subs + j
                xr, wr = x[r], w[r % w.shape[0]]
                step, offset = fit_offset(xr, wr, n, top, True, first, stride, tries, shift, shifts)
                steps[j], offsets[j] = step, offset
                widest = step if step > widest else widest
                deepest = -offset if -offset > deepest else deepest
                sw, sx = ZERO, ZERO
                for i in range(n):
                    sw += wr[i]
                    sx += wr[i] * xr[i]
                sums_w[j], sums_x[j] = sw, sx
            best_error, best_d, best_m = LARGEST, ZERO, ZERO
            for j in range(subs):
                s[b, j] = 0
                o[b, j] = 0
            divisor_d = common_divisor(steps, subs, most)
            for start in range(1 if divisor_d == ZERO else 2):
                now_d, now_m = half(widest / F(most)), half(deepest / F(most))
                if start == 1:
                    now_d = half(divisor_d)
                    now_m = half(common_offset(offsets, steps, subs, most))
                for j in range(subs):
                    trial_s[j] = clipped(steps[j] * inverse(now_d), 0, most)
                    trial_o[j] = clipped(-offsets[j] * inverse(now_m), 0, most)
                for _ in range(rounds):
                    total = ZERO
                    dd, dm, mm, dx, mx = ZERO, ZERO, ZERO, ZERO, ZERO
                    for j in range(subs):
                        r = b * subs + j
                        xr, wr = x[r], w[r % w.shape[0]]
                        least, chosen_s, chosen_o = LARGEST, 0, 0
                        for t in range(
                            max(trial_s[j] - reach, 0), min(trial_s[j] + reach, most) + 1
                        ):
                            for u in range(
                                max(trial_o[j] - reach_o, 0), min(trial_o[j] + reach_o, most) + 1
                            ):
                                step, offset = now_d * F(t), -(now_m * F(u))
                                error = error_at(xr, wr, n, step, offset, ZERO, top, False)
                                if error < least:
                                    least, chosen_s, chosen_o = error, t, u
                        trial_s[j], trial_o[j] = chosen_s, chosen_o
                        total += least
                        fs, fo = F(chosen_s), F(chosen_o)
                        sq, sqq, sxq = sums_at(
                            xr, wr, n, inverse(now_d * fs), -(now_m * fo), ZERO, top, False
                        )
                        dd += fs * fs * sqq
                        dm += fs * fo * sq
                        mm += fo * fo * sums_w[j]
                        dx += fs * sxq
                        mx += fo * sums_x[j]
                    if total < best_error:
                        best_error, best_d, best_m = total, now_d, now_m
                        for j in range(subs):
                            s[b, j] = trial_s[j]
                            o[b, j] = trial_o[j]
                    following_d, following_m = solve_halves(dd, dm, mm, dx, mx)
                    if following_d == now_d and following_m == now_m:
                        break
                    now_d, now_m = following_d, following_m
            d[b] = best_d
            m[b] = best_m
            for j in range(subs):
                r = b * subs + j
                store_indices(
                    q[r], x[r], n, best_d * F(s[b, j]), -(best_m * F(o[b, j])), ZERO, top, False
                )

    return fit_scaled_offset


@helper
def solve_halves(dd: Any, dm: Any, mm: Any, dx: Any, mx: Any) -> Any:
    """d and m with the least Σ w (x - d·(sq) + m·o)², given the sums over the super-block; the
    rounding of d to a half float is made up for by m."""
    if not dd > ZERO:
        return ZERO, half(-mx / mm) if mm > ZERO else ZERO
    if not mm * dd > dm * dm:
        return half(dx / dd), ZERO
    d = half((dx * mm - dm * mx) / (dd * mm - dm * dm))
    return d, half((d * dm - mx) / mm)


_fit_scaled_16, _fit_scaled_32 = scaled(16, is_table=False), scaled(32, is_table=True)
_fit_offset_16, _fit_offset_32 = scaled_offset(16), scaled_offset(32)


def fit_q2_k(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_offset_16(x, w, d, m, s, o, q, F(3), F(2), F(0.25), 9, F(0.25), 2, 15, 2, 2, 4)


def fit_q3_k(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_scaled_16(x, w, d, s, q, F(-4), F(3), F(2), F(0.125), 32, -32, 31, 2, 3)


def fit_q4_k(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_offset_32(x, w, d, m, s, o, q, F(15), F(12), F(0.25), 20, F(0.5), 2, 63, 2, 3, 3)


def fit_q5_k(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_offset_32(x, w, d, m, s, o, q, F(31), F(28), F(0.25), 20, F(0.5), 2, 63, 2, 3, 3)


def fit_q6_k(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_scaled_16(x, w, d, s, q, F(-32), F(31), F(26), F(0.5), 32, -128, 127, 2, 3)


def fit_iq4_xs(x: Any, w: Any, d: Any, m: Any, s: Any, o: Any, q: Any) -> None:
    _fit_scaled_32(x, w, d, s, q, ZERO, ZERO, F(89), F(6), 17, -32, 31, 2, 3)
