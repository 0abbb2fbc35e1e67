"""Decodes plain floats and the first-generation blocks (Q4_0 … Q8_0) into float32.

Owns: the byte layout of these formats. Must not know: files, tensor shapes, the other formats.
Called through the table in `formats.py`; every function maps uint8 (n_blocks, nbytes) to float32
(n_blocks, weights). Layouts: ggml's `ggml-common.h`. All numbers are little-endian, `d` and `m`
are IEEE half floats of either sign.
"""

import numpy as np


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half float at byte `start` of every block, as float32 (n_blocks, 1)."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """All low nibbles, then all high nibbles, of the last axis: (…, k) to (…, 2k)."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


# F32: | 4 bytes |   F16: | 2 bytes |   BF16: | the upper 2 bytes of an F32 |
# Plain values are blocks of one weight, so that the table needs no special case.
def decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def decode_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def decode_bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


# Q4_0, 32 weights in 18 bytes: w = d·(q - 8)
#   | 0  d | 2  qs: 16 bytes, byte j = weight j (low nibble) and weight j+16 (high) |
def decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    q = nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return half(blocks, 0) * q.astype(np.float32)


# Q4_1, 32 weights in 20 bytes: w = d·q + m
#   | 0  d | 2  m | 4  qs: 16 bytes, nibbles as in Q4_0 |
def decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    q = nibbles(blocks[:, 4:])
    return half(blocks, 0) * q.astype(np.float32) + half(blocks, 2)


def _fifth_bits(mask: np.ndarray) -> np.ndarray:
    """32-bit mask (n, 4) to its bits at their place in a five-bit number, 0 or 16: (n, 32)."""
    return np.unpackbits(mask, axis=1, bitorder="little") << 4


# Q5_0, 32 weights in 22 bytes: w = d·(q - 16)
#   | 0  d | 2  qh: 32 bits, bit j = fifth bit of weight j | 6  qs: 16 bytes, nibbles as in Q4_0 |
def decode_q5_0(blocks: np.ndarray) -> np.ndarray:
    q = (nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.int8) - np.int8(16)
    return half(blocks, 0) * q.astype(np.float32)


# Q5_1, 32 weights in 24 bytes: w = d·q + m
#   | 0  d | 2  m | 4  qh: 32 bits as in Q5_0 | 8  qs: 16 bytes, nibbles as in Q4_0 |
def decode_q5_1(blocks: np.ndarray) -> np.ndarray:
    q = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * q.astype(np.float32) + half(blocks, 2)


# Q8_0, 32 weights in 34 bytes: w = d·q
#   | 0  d | 2  qs: 32 signed bytes |
def decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
