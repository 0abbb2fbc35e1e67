"""The bytes of the K-quants (super-blocks of 256 weights with small sub-scales): decode and pack.

Owns: the byte layout of Q2_K … Q6_K. Must not know: files, tensor shapes, the other formats.
Readers are called through the table in `formats.py` and map uint8 (n_blocks, nbytes) to Parts.
Packers, called through the table in `grid.py`, are their inverse: d and dmin
float32 (n_blocks,) of values that are halves, sub-scales s (signed where the format's are) and
sub-minimums o int16 (n_blocks, sub-blocks), integers q uint8 (n_blocks, 256) as stored.
Layouts: ggml's `ggml-common.h`; `d` and `dmin` are half floats of either sign.
"""

import numpy as np

from .blocks_legacy import half, nibbles, pack_half, pack_nibbles
from .parts import Parts

# Shifts that pull four 2-bit fields out of a byte, lowest first; shaped to broadcast over the
# groups of planes below.
_TWO_BIT_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
_BIT_SHIFTS = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)


def two_bit_planes(packed: np.ndarray) -> np.ndarray:
    """64 bytes to 256 two-bit numbers: (n, 64) to (n, 256).

    Each group of 32 bytes serves 128 weights: bits 0-1 of its bytes are weights 0-31 of the 128,
    bits 2-3 weights 32-63, and so on.
    """
    groups = packed.reshape(-1, 2, 1, 32)
    return ((groups >> _TWO_BIT_SHIFTS) & 3).reshape(-1, 256)


def _bit_planes(packed: np.ndarray) -> np.ndarray:
    """32 bytes to 256 bits: bit k of byte j belongs to weight 32k + j: (n, 32) to (n, 8, 32)."""
    return (packed.reshape(-1, 1, 32) >> _BIT_SHIFTS) & 1


def _pack_two_bit_planes(q: np.ndarray) -> np.ndarray:
    """The inverse of `two_bit_planes`; only the low two bits of q count."""
    planes = (q & 3).reshape(-1, 2, 4, 32) << _TWO_BIT_SHIFTS
    return np.bitwise_or.reduce(planes, axis=2).reshape(-1, 64)


def _pack_bit_planes(bits: np.ndarray) -> np.ndarray:
    """The inverse of `_bit_planes`, of numbers 0 and 1."""
    return np.bitwise_or.reduce(bits.reshape(-1, 8, 32) << _BIT_SHIFTS, axis=1)


# Q2_K, 256 weights in 84 bytes, 16 sub-blocks of 16: w = (d·s)·q - dmin·m
#   | 0  16 bytes: s (low nibble), m (high) | 16  qs: 64 bytes of 2-bit planes | 80  d | 82  dmin |
def parts_q2_k(blocks: np.ndarray) -> Parts:
    packed = blocks[:, :16]
    scale = half(blocks, 80) * (packed & 0x0F).astype(np.float32)
    low = half(blocks, 82) * (packed >> 4).astype(np.float32)
    return Parts(two_bit_planes(blocks[:, 16:80]).view(np.int8), scale, -low)


def pack_q2_k(
    d: np.ndarray, dmin: np.ndarray, s: np.ndarray, o: np.ndarray, q: np.ndarray
) -> np.ndarray:
    packed = (s | (o << 4)).astype(np.uint8)
    parts = (packed, _pack_two_bit_planes(q), pack_half(d), pack_half(dmin))
    return np.concatenate(parts, axis=1)


# Q3_K, 256 weights in 110 bytes, 16 sub-blocks of 16: w = d·(s - 32)·(q - 4)
#   | 0  hmask: 32 bytes, third bits of q | 32  qs: 64 bytes, two low bits as in Q2_K |
#   | 96  12 bytes of 6-bit s             | 108  d |
#   s of sub-block i: low four bits in byte i mod 8 (low nibble for i < 8, else high),
#   top two bits in byte 8 + i mod 4 at bits 2·(i div 4).
def parts_q3_k(blocks: np.ndarray) -> Parts:
    low = nibbles(blocks[:, 96:104])
    top = (blocks[:, None, 104:108] >> _TWO_BIT_SHIFTS[0]) & 3
    s = (low | (top.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    third = _bit_planes(blocks[:, :32]).reshape(-1, 256) << 2
    q = (two_bit_planes(blocks[:, 32:96]) | third).astype(np.int8) - np.int8(4)
    return Parts(q, half(blocks, 108) * s.astype(np.float32))


def pack_q3_k(d: np.ndarray, s: np.ndarray, q: np.ndarray) -> np.ndarray:
    stored = (s + 32).astype(np.uint8)
    top = (stored >> 4).reshape(-1, 4, 4) << _TWO_BIT_SHIFTS[0]
    scales = (pack_nibbles(stored), np.bitwise_or.reduce(top, axis=1))
    parts = (_pack_bit_planes(q >> 2), _pack_two_bit_planes(q), *scales, pack_half(d))
    return np.concatenate(parts, axis=1)


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes that Q4_K and Q5_K share, to scales and minimums, each (n, 8).

    byte 0-3:  s0…s3 in bits 0-5, top two bits of s4…s7 in bits 6-7
    byte 4-7:  m0…m3 in bits 0-5, top two bits of m4…m7 in bits 6-7
    byte 8-11: s4…s7 low nibble,  m4…m7 high nibble
    """
    s, m, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((s & 63, (rest & 0x0F) | ((s >> 6) << 4)), axis=1)
    minimums = np.concatenate((m & 63, (rest >> 4) | ((m >> 6) << 4)), axis=1)
    return scales, minimums


def _pack_six_bit_pairs(s: np.ndarray, m: np.ndarray) -> np.ndarray:
    s, m = s.astype(np.uint8), m.astype(np.uint8)
    first = (s[:, :4] | ((s[:, 4:] >> 4) << 6), m[:, :4] | ((m[:, 4:] >> 4) << 6))
    return np.concatenate((*first, (s[:, 4:] & 0x0F) | (m[:, 4:] << 4)), axis=1)


def _scale_and_shift(blocks: np.ndarray, q: np.ndarray) -> Parts:
    """(d·s)·q - dmin·m for blocks that start with d, dmin and the 12 packed bytes."""
    s, m = _six_bit_pairs(blocks[:, 4:16])
    low = half(blocks, 2) * m.astype(np.float32)
    scale = half(blocks, 0) * s.astype(np.float32)
    return Parts(q.reshape(-1, 256).view(np.int8), scale, -low)


# Q4_K, 256 weights in 144 bytes, 8 sub-blocks of 32: w = (d·s)·q - dmin·m
#   | 0  d | 2  dmin | 4  12 bytes of 6-bit s and m | 16  qs: 128 bytes |
#   32 bytes of qs hold two sub-blocks: 2k in the low nibbles, 2k+1 in the high ones.
def parts_q4_k(blocks: np.ndarray) -> Parts:
    return _scale_and_shift(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def pack_q4_k(
    d: np.ndarray, dmin: np.ndarray, s: np.ndarray, o: np.ndarray, q: np.ndarray
) -> np.ndarray:
    qs = pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate((pack_half(d), pack_half(dmin), _pack_six_bit_pairs(s, o), qs), axis=1)


# Q5_K, 256 weights in 176 bytes: as Q4_K, and a plane of fifth bits
#   | 0  d | 2  dmin | 4  12 bytes of 6-bit s and m | 16  qh: 32 bytes | 48  qs: 128 bytes |
#   Bit k of byte j of qh is the fifth bit of weight j of sub-block k.
def parts_q5_k(blocks: np.ndarray) -> Parts:
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _scale_and_shift(blocks, low | (_bit_planes(blocks[:, 16:48]) << 4))


def pack_q5_k(
    d: np.ndarray, dmin: np.ndarray, s: np.ndarray, o: np.ndarray, q: np.ndarray
) -> np.ndarray:
    head = (pack_half(d), pack_half(dmin), _pack_six_bit_pairs(s, o))
    qs = pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate((*head, _pack_bit_planes(q >> 4), qs), axis=1)


# Q6_K, 256 weights in 210 bytes, 16 sub-blocks of 16: w = (d·s)·(q - 32), s a signed byte
#   | 0  ql: 128 bytes, low four bits | 128  qh: 64 bytes of 2-bit planes | 192  16 s | 208  d |
#   64 bytes of ql serve 128 weights: the first 64 in the low nibbles, the last 64 in the high.
def parts_q6_k(blocks: np.ndarray) -> Parts:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    top = two_bit_planes(blocks[:, 128:192]) << 4
    q = (low | top).astype(np.int8) - np.int8(32)
    s = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Parts(q, half(blocks, 208) * s)


def pack_q6_k(d: np.ndarray, s: np.ndarray, q: np.ndarray) -> np.ndarray:
    low = pack_nibbles(q.reshape(-1, 2, 128)).reshape(-1, 128)
    parts = (low, _pack_two_bit_planes(q >> 4), s.astype(np.int8).view(np.uint8), pack_half(d))
    return np.concatenate(parts, axis=1)
