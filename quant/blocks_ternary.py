"""The bytes of ternary blocks (TQ1_0, TQ2_0), whose weights are -d, 0 or d.

Owns: their byte layout. Must not know: files, tensor shapes, the other formats. Readers are called
through the table in `formats.py` and map uint8 (n_blocks, nbytes) to Parts.
Layouts: ggml's `ggml-common.h`.
"""

import numpy as np

from .blocks_k import two_bit_planes
from .blocks_legacy import half
from .parts import Parts

_POWERS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


def _trits(packed: np.ndarray, n: int) -> np.ndarray:
    """The first n ternary digits of each byte, (…, k) to (…, n·k), first digits first.

    A byte is the fraction 0.t0t1t2t3t4 of base three, in 256ths: times 3^i modulo 256 digit i
    leads, and its product with 3 has the digit before the point.
    """
    moved = packed[..., None, :] * _POWERS[:n, None]
    digits = (moved.astype(np.uint16) * 3) >> 8
    return digits.astype(np.int8).reshape(*packed.shape[:-1], -1)


# TQ1_0, 256 weights in 54 bytes: w = d·(t - 1)
#   | 0  32 bytes of 5 digits: weights 0-159 | 32  16 bytes: 160-239 | 48  4 bytes of 4: 240-255 |
#   | 52  d |   Digit i of byte j of a run of k bytes is weight k·i + j of its run.
def parts_tq1_0(blocks: np.ndarray) -> Parts:
    runs = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return Parts(np.concatenate(runs, axis=1) - np.int8(1), half(blocks, 52))


# TQ2_0, 256 weights in 66 bytes: w = d·(q - 1)
#   | 0  qs: 64 bytes of 2-bit planes | 64  d |
def parts_tq2_0(blocks: np.ndarray) -> Parts:
    return Parts(two_bit_planes(blocks[:, :64]).view(np.int8) - np.int8(1), half(blocks, 64))
