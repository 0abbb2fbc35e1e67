"""The bytes of the non-linear 4-bit blocks (IQ4_NL, IQ4_XS): decode and pack.

Owns: their value table and byte layout. Must not know: files, tensor shapes, the other formats.
Readers are called through the table in `formats.py` and map uint8 (n_blocks, nbytes) to Parts;
packers, through the table in `grid.py`, are their inverse (see `blocks_k.py`).
Layouts and table values: ggml's `ggml-common.h`.
"""

import numpy as np

from .blocks_legacy import half, nibbles, pack_half, pack_nibbles
from .parts import Parts

# The table is lopsided (-127 … 113), so the sign of the scale matters.
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_CODES = IQ4_VALUES.astype(np.int8)


# IQ4_NL, 32 weights in 18 bytes: w = d·T[q]
#   | 0  d | 2  qs: 16 bytes, byte j = weight j (low nibble) and weight j+16 (high) |
def parts_iq4_nl(blocks: np.ndarray) -> Parts:
    return Parts(_CODES[nibbles(blocks[:, 2:])], half(blocks, 0))


# IQ4_XS, 256 weights in 136 bytes, 8 sub-blocks of 32: w = d·(s - 32)·T[q]
#   | 0  d | 2  u16: top two bits of s, sub-block k at bits 2k | 4  4 bytes: low four bits of s |
#   | 8  qs: 128 bytes, 16 for each sub-block, nibbles as in IQ4_NL |
#   Byte k of the four holds sub-block 2k in its low and 2k+1 in its high nibble.
def parts_iq4_xs(blocks: np.ndarray) -> Parts:
    low = nibbles(blocks[:, 4:8, None]).reshape(-1, 8)
    top = (blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    s = (low | (top << 4)).astype(np.float32) - np.float32(32)
    codes = _CODES[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return Parts(codes.reshape(-1, 256), half(blocks, 0) * s)


def pack_iq4_xs(d: np.ndarray, s: np.ndarray, q: np.ndarray) -> np.ndarray:
    """IQ4_NL's packer is Q4_0's."""
    stored = (s + 32).astype(np.uint8)
    low = (stored[:, 0::2] & 0x0F) | (stored[:, 1::2] << 4)
    top = ((stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(
        axis=1, dtype=np.uint16
    )
    qs = pack_nibbles(q.reshape(-1, 8, 32)).reshape(-1, 128)
    return np.concatenate(
        (pack_half(d), top.astype("<u2")[:, None].view(np.uint8), low, qs), axis=1
    )
