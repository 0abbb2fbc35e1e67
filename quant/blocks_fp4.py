"""The bytes of MXFP4 blocks: read and pack.

Owns: their values, scales and byte layout. Must not know: files, tensor shapes, other formats.
Values and scales: OCP Microscaling Formats (MX) 1.0; layout: ggml's `ggml-common.h`.
"""

import numpy as np

from .blocks_legacy import nibbles, pack_nibbles
from .parts import Parts

# Twice the values of E2M1, so that they are whole; bit 3 of the index is the sign.
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
E8M0_NAN = 255
E8M0_MOST = 254


def half_e8m0(e: np.ndarray) -> np.ndarray:
    """2^(e - 128) as float32: half of what the byte means, for values stored twice as large."""
    power = np.ldexp(np.float32(1), e.astype(np.int32) - 128)
    return np.where(e == E8M0_NAN, np.float32(np.nan), power)


# MXFP4, 32 weights in 17 bytes: w = 2^(e - 127)·T[q]
#   | 0  e | 1  qs: 16 bytes, byte j = weight j (low nibble) and weight j+16 (high) |
def parts_mxfp4(blocks: np.ndarray) -> Parts:
    return Parts(FP4_VALUES[nibbles(blocks[:, 1:])], half_e8m0(blocks[:, :1]))


def pack_mxfp4(e: np.ndarray, q: np.ndarray) -> np.ndarray:
    """e uint8 (n,), q uint8 (n, 32) indices of values."""
    return np.concatenate((e[:, None], pack_nibbles(q)), axis=1)
