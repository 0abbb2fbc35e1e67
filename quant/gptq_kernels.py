"""The loops of `gptq.py`: rows by columns, one row at a time.

Owns: rounding a block with feedback, descent, refits. Must not know: formats' bytes, how scales are
fitted, threads. All arrays float32 but the codes, uint8; a level is the value of a code, step and
offset of a sub-block make a weight of it.
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
def round_block(w: Any, step: Any, offset: Any, levels: Any, sub: int, u: Any) -> Any:
    """Rounds the columns of w (rows, block) under their scales (rows, subs).

    Each error is spread over the columns behind it by u (block, block); w is what became of them.
    Returns codes and errors (rows, block).
    """
    rows, block = w.shape
    codes = np.empty((rows, block), np.uint8)
    lost = np.empty((rows, block), np.float32)
    for r in range(rows):
        row = w[r]
        for j in range(block):
            group = j // sub
            code = nearest_code(row[j], step[r, group], offset[r, group], levels)
            error = row[j] - (step[r, group] * levels[code] + offset[r, group])
            codes[r, j] = code
            lost[r, j] = error
            uj = u[j]
            for k in range(j + 1, block):
                row[k] -= error * uj[k]
    return codes, lost


@kernel
def descend(
    g: Any, h: Any, step: Any, offset: Any, levels: Any, sub: int, codes: Any, sweeps: int
) -> None:
    """Moves single codes to where e H eT is least, the others fixed; g (rows, n) is e H."""
    rows, n = codes.shape
    half_gap = np.diff(levels).min() * F(0.5)
    for r in range(rows):
        row = g[r]
        for _ in range(sweeps):
            moved = 0
            for j in range(n):
                a, b = step[r, j // sub], offset[r, j // sub]
                if abs(row[j]) <= abs(a) * half_gap * h[j, j]:
                    continue  # nearer to where it is than to any other level
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
def refit(g: Any, by_d: Any, by_m: Any, hd: Any, hm: Any, has_m: bool, d: Any, m: Any) -> None:
    """Solves for d and m (rows,) of a block whose gradient is g (rows, block), e H in its columns.

    by_d and by_m (rows, block) are what a weight changes by per unit of d and of m, hd and hm
    their products with H of the block. Taken is what lowers the error after rounding to halves.
    """
    rows, n = g.shape
    for r in range(rows):
        row = g[r]
        gd, gm, dd, dm, mm = 0.0, 0.0, 0.0, 0.0, 0.0
        for j in range(n):
            gd += by_d[r, j] * row[j]
            gm += by_m[r, j] * row[j]
            dd += by_d[r, j] * hd[r, j]
            dm += by_d[r, j] * hm[r, j]
            mm += by_m[r, j] * hm[r, j]
        if dd <= 0.0:
            continue
        new_d, new_m = d[r], m[r]
        determinant = dd * mm - dm * dm
        if has_m and determinant > 1e-6 * dd * mm:
            new_d = half(F(d[r] + (gd * mm - gm * dm) / determinant))
            # m makes up for what rounding did to d
            new_m = half(F(m[r] + (gm - dm * (new_d - d[r])) / mm))
        else:
            new_d = half(F(d[r] + gd / dd))
        x, y = new_d - d[r], new_m - m[r]
        if (x * x * dd + 2 * x * y * dm + y * y * mm) < 2 * (x * gd + y * gm):
            d[r], m[r] = new_d, new_m
            for k in range(n):
                row[k] -= x * hd[r, k] + y * hm[r, k]
