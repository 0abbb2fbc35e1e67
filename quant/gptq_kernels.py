"""The loops of `gptq.py`: rows by columns, one row at a time.

Owns: rounding a block with feedback, spreading its errors, descent, refits. Must not know: formats'
bytes, how scales are fitted, threads. All arrays float32 but the codes, uint8; a level is the
value of a code, step and offset of a sub-block make a weight of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .encode_math import half, helper, kernel

F = np.float32
ZERO = F(0)


@helper
def nearest_code(value: Any, step: Any, offset: Any, levels: Any) -> Any:
    if step == ZERO:
        return 0
    wanted = (value - offset) / step
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if wanted > (levels[middle] + levels[middle + 1]) * F(0.5):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def round_block(
    w: Any, start: int, step: Any, offset: Any, levels: Any, sub: int, u: Any, codes: Any, lost: Any
) -> None:
    """Rounds columns start … of w (rows, n) under the block's scales (rows, subs).

    Each error is spread over the columns of the block behind it; lost (rows, block) are the errors.
    """
    rows, block = lost.shape
    for r in range(rows):
        for j in range(block):
            at, group = start + j, j // sub
            code = nearest_code(w[r, at], step[r, group], offset[r, group], levels)
            error = w[r, at] - (step[r, group] * levels[code] + offset[r, group])
            codes[r, at] = code
            lost[r, j] = error
            for k in range(at + 1, start + block):
                w[r, k] -= error * u[at, k]


@kernel
def spread(w: Any, start: int, lost: Any, u: Any) -> None:
    """Puts the errors of a block (rows, block) onto all columns of w behind it."""
    rows, block = lost.shape
    n = w.shape[1]
    for first in range(0, rows, 4):
        if first + 4 <= rows:
            w0, w1, w2, w3 = w[first], w[first + 1], w[first + 2], w[first + 3]
            for j in range(block):
                e0, e1 = lost[first, j], lost[first + 1, j]
                e2, e3 = lost[first + 2, j], lost[first + 3, j]
                row = u[start + j]
                for k in range(start + block, n):
                    w0[k] -= e0 * row[k]
                    w1[k] -= e1 * row[k]
                    w2[k] -= e2 * row[k]
                    w3[k] -= e3 * row[k]
        else:
            for r in range(first, rows):
                for j in range(block):
                    for k in range(start + block, n):
                        w[r, k] -= lost[r, j] * u[start + j, k]


@kernel
def descend(
    g: Any, h: Any, step: Any, offset: Any, levels: Any, sub: int, codes: Any, sweeps: int
) -> None:
    """Moves single codes to where e H eT is least, the others fixed; g (rows, n) is e H."""
    rows, n = codes.shape
    for r in range(rows):
        row = g[r]
        for _ in range(sweeps):
            moved = 0
            for j in range(n):
                a, b = step[r, j // sub], offset[r, j // sub]
                old = codes[r, j]
                value = a * levels[old] + b
                code = nearest_code(value + row[j] / h[j, j], a, b, levels)
                if code == old:
                    continue
                change = a * (levels[code] - levels[old])
                codes[r, j] = code
                moved += 1
                hj = h[j]
                for k in range(n):
                    row[k] -= change * hj[k]
            if moved == 0:
                break


@kernel
def refit(g: Any, h: Any, by_d: Any, by_m: Any, block: int, has_m: bool, d: Any, m: Any) -> None:
    """Solves for d and m of every block, (rows, blocks), in turn; g (rows, n) is e H.

    by_d and by_m (rows, n) are what a weight changes by per unit of d and of m. Taken is what
    lowers the error after rounding to half floats.
    """
    rows, n = g.shape
    hd = np.empty(n, np.float32)
    hm = np.empty(n, np.float32)
    for r in range(rows):
        row = g[r]
        for b in range(n // block):
            start, end = b * block, (b + 1) * block
            hd[:] = ZERO
            hm[:] = ZERO
            for j in range(start, end):
                x, y = by_d[r, j], by_m[r, j]
                hj = h[j]
                for k in range(n):
                    hd[k] += x * hj[k]
                if has_m:
                    for k in range(n):
                        hm[k] += y * hj[k]
            gd, gm, dd, dm, mm = 0.0, 0.0, 0.0, 0.0, 0.0
            for j in range(start, end):
                gd += by_d[r, j] * row[j]
                gm += by_m[r, j] * row[j]
                dd += by_d[r, j] * hd[j]
                dm += by_d[r, j] * hm[j]
                mm += by_m[r, j] * hm[j]
            if dd <= 0.0:
                continue
            new_d, new_m = d[r, b], m[r, b]
            determinant = dd * mm - dm * dm
            if has_m and determinant > 1e-6 * dd * mm:
                new_d = half(F(d[r, b] + (gd * mm - gm * dm) / determinant))
                # m makes up for what rounding did to d
                new_m = half(F(m[r, b] + (gm - dm * (new_d - d[r, b])) / mm))
            else:
                new_d = half(F(d[r, b] + gd / dd))
            x, y = new_d - d[r, b], new_m - m[r, b]
            if (x * x * dd + 2 * x * y * dm + y * y * mm) < 2 * (x * gd + y * gm):
                d[r, b], m[r, b] = new_d, new_m
                for k in range(n):
                    row[k] -= x * hd[k] + y * hm[k]
