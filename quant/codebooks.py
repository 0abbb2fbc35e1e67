"""The vectors that codes of the IQ1, IQ2 and IQ3 blocks stand for.

Owns: those tables, as the `gguf` package (its `quants.py`) holds them, and a compact form of them
for kernels. Must not know: how blocks store their codes.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# Magnitudes that components take, in order of their indices; of IQ1 the values themselves.
MAGNITUDES: dict[str, tuple[int, ...]] = {
    "IQ1_S": (-1, 0, 1),
    "IQ1_M": (-1, 0, 1),
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}


@cache
def codebook(format_name: str) -> np.ndarray:
    """int8 (n, 8), of IQ3 (n, 4): the vector of each code."""
    from gguf import quants  # only files of these formats pay for the import

    table = getattr(quants, format_name)
    table.init_grid()
    values: np.ndarray = table.grid.reshape(table.grid_shape).astype(np.int8)
    return values


@cache
def packed_codebook(format_name: str) -> np.ndarray:
    """uint16 (n,): the index of component i at bits 2·i, of IQ3 at bits 4·i."""
    vectors = codebook(format_name)
    indices = np.searchsorted(MAGNITUDES[format_name], vectors).astype(np.uint16)
    shifts = np.arange(0, 16, 16 // vectors.shape[1], dtype=np.uint16)
    return np.bitwise_or.reduce(indices << shifts, axis=1, dtype=np.uint16)
