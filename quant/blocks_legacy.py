"""The bytes of plain floats and of the first-generation blocks (Q4_0 … Q8_0): decode and pack.

Owns: the byte layout of these formats. Must not know: files, tensor shapes, the other formats.
Readers are called through the table in `formats.py`: they map uint8 (n_blocks, nbytes) to Parts, or
to float32 where a format is plain floats. Packers, called through the table in `grid.py`, are their
inverse: float32 d and m (n_blocks,) of values that are halves, integers q uint8 (n_blocks, weights)
as stored. Layouts: ggml's `ggml-common.h`. All numbers are little-endian, `d` and `m` are IEEE half
floats of either sign.
"""

import numpy as np

from .parts import Parts


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half float at byte `start` of every block, as float32 (n_blocks, 1)."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """All low nibbles, then all high nibbles, of the last axis: (…, k) to (…, 2k)."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def pack_half(values: np.ndarray) -> np.ndarray:
    """float32 (n,) to uint8 (n, 2)."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def pack_nibbles(q: np.ndarray) -> np.ndarray:
    """The inverse of `nibbles`: (…, 2k) numbers to (…, k) bytes; only their low four bits count."""
    k = q.shape[-1] // 2
    return (q[..., :k] & 0x0F) | (q[..., k:] << 4)


# F32: | 4 bytes |   F16: | 2 bytes |   BF16: | the upper 2 bytes of an F32 |
# Plain values are blocks of one weight, so that the table needs no special case.
def decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def decode_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def decode_bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def pack_f32(values: np.ndarray) -> np.ndarray:
    return values.astype("<f4").view(np.uint8)


def pack_f16(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8)


def pack_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even; NaN stays a (quiet) NaN."""
    bits = values.astype("<f4").view("<u4")
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(np.uint8)


# Q4_0, 32 weights in 18 bytes: w = d·(q - 8)
#   | 0  d | 2  qs: 16 bytes, byte j = weight j (low nibble) and weight j+16 (high) |
def parts_q4_0(blocks: np.ndarray) -> Parts:
    return Parts(nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8), half(blocks, 0))


def pack_q4_0(d: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.concatenate((pack_half(d), pack_nibbles(q)), axis=1)


# Q4_1, 32 weights in 20 bytes: w = d·q + m
#   | 0  d | 2  m | 4  qs: 16 bytes, nibbles as in Q4_0 |
def parts_q4_1(blocks: np.ndarray) -> Parts:
    return Parts(nibbles(blocks[:, 4:]).view(np.int8), half(blocks, 0), half(blocks, 2))


def pack_q4_1(d: np.ndarray, m: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.concatenate((pack_half(d), pack_half(m), pack_nibbles(q)), axis=1)


def _pack_fifth_bits(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _fifth_bits(mask: np.ndarray) -> np.ndarray:
    """32-bit mask (n, 4) to its bits at their place in a five-bit number, 0 or 16: (n, 32)."""
    return np.unpackbits(mask, axis=1, bitorder="little") << 4


# Q5_0, 32 weights in 22 bytes: w = d·(q - 16)
#   | 0  d | 2  qh: 32 bits, bit j = fifth bit of weight j | 6  qs: 16 bytes, nibbles as in Q4_0 |
def parts_q5_0(blocks: np.ndarray) -> Parts:
    q = (nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.int8) - np.int8(16)
    return Parts(q, half(blocks, 0))


def pack_q5_0(d: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.concatenate((pack_half(d), _pack_fifth_bits(q), pack_nibbles(q)), axis=1)


# Q5_1, 32 weights in 24 bytes: w = d·q + m
#   | 0  d | 2  m | 4  qh: 32 bits as in Q5_0 | 8  qs: 16 bytes, nibbles as in Q4_0 |
def parts_q5_1(blocks: np.ndarray) -> Parts:
    q = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Parts(q.view(np.int8), half(blocks, 0), half(blocks, 2))


def pack_q5_1(d: np.ndarray, m: np.ndarray, q: np.ndarray) -> np.ndarray:
    parts = (pack_half(d), pack_half(m), _pack_fifth_bits(q), pack_nibbles(q))
    return np.concatenate(parts, axis=1)


# Q8_0, 32 weights in 34 bytes: w = d·q
#   | 0  d | 2  qs: 32 signed bytes |
def parts_q8_0(blocks: np.ndarray) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), half(blocks, 0))


def pack_q8_0(d: np.ndarray, q: np.ndarray) -> np.ndarray:
    """q counts from -127, the lowest level in use."""
    return np.concatenate((pack_half(d), q + np.uint8(256 - 127)), axis=1)
