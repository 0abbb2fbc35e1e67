"""The bytes of blocks whose codes stand for vectors of four or eight weights (IQ1 … IQ3).

Owns: their byte layout. Must not know: files, tensor shapes, the other formats, and the vectors
themselves, which are in `codebooks.py`. Readers are called through the table in `formats.py` and
map uint8 (n_blocks, nbytes) to Parts. Layouts: ggml's `ggml-common.h`.

All are super-blocks of 256 weights. A sub-scale s counts as 2·s + 1; d's of IQ2 and IQ3_XXS are
divided by a power of two, which is exact.
"""

import numpy as np

from .blocks_legacy import half
from .codebooks import codebook
from .parts import Parts

_BITS = np.arange(8, dtype=np.uint8)
# Sign bits of eight weights by the seven that a block stores: the eighth makes their number even.
_SIGNS = np.array([s | (s.bit_count() & 1) << 7 for s in range(128)], dtype=np.uint8)


def _fields(packed: np.ndarray, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """Fields of unsigned integers (n, k), side by side: (n, k·len(shifts)), dtype as packed."""
    parts = (packed[:, :, None] >> np.array(shifts, packed.dtype)) & packed.dtype.type(mask)
    return parts.reshape(len(packed), -1)


def _signed(vectors: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Vectors (n, …) and their sign bits (n, 32), as codes (n, 256)."""
    is_minus = (signs[:, :, None] >> _BITS) & 1
    codes = vectors.reshape(len(signs), 256)
    return np.where(is_minus.reshape(codes.shape) == 1, -codes, codes)


def _odd(s: np.ndarray) -> np.ndarray:
    return (2 * s + 1).astype(np.float32)


# IQ2_XXS, 66 bytes, 8 sub-blocks of 32: w = d/8·(2·s + 1)·±v
#   | 0  d | 2  8 x | four codes of vectors, a byte each | u32: four times seven signs, s on top ||
def parts_iq2_xxs(blocks: np.ndarray) -> Parts:
    words = blocks[:, 2:].view("<u4").reshape(-1, 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    vectors = codebook("IQ2_XXS")[codes]
    return Parts(_signed(vectors, _seven_signs(words[:, :, 1])), _eighths(blocks, words[:, :, 1]))


def _seven_signs(words: np.ndarray) -> np.ndarray:
    """(n, 8) words to the sign bits of all weights (n, 32)."""
    return _SIGNS[_fields(words, (0, 7, 14, 21), 127)]


def _eighths(blocks: np.ndarray, words: np.ndarray) -> np.ndarray:
    return half(blocks, 0) / 8 * _odd(words >> 28)


# IQ2_XS, 74 bytes, 16 sub-blocks of 16: w = d/8·(2·s + 1)·±v
#   | 0  d | 2  32 u16: a code in 9 bits, seven signs above it | 66  8 bytes: s, low nibble first |
def parts_iq2_xs(blocks: np.ndarray) -> Parts:
    words = blocks[:, 2:66].view("<u2")
    codes = _signed(codebook("IQ2_XS")[words & 511], _SIGNS[words >> 9])
    return Parts(codes, half(blocks, 0) / 8 * _odd(_fields(blocks[:, 66:74], (0, 4), 15)))


# IQ2_S, 82 bytes, 16 sub-blocks of 16: w = d/8·(2·s + 1)·±v
#   | 0  d | 2  32 bytes: codes | 34  32 bytes: signs | 66  8 bytes: two bits more of each code |
#   | 74  8 bytes: s, low nibble first |
def parts_iq2_s(blocks: np.ndarray) -> Parts:
    top = _fields(blocks[:, 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    vectors = codebook("IQ2_S")[blocks[:, 2:34] | top << 8]
    scale = half(blocks, 0) / 8 * _odd(_fields(blocks[:, 74:82], (0, 4), 15))
    return Parts(_signed(vectors, blocks[:, 34:66]), scale)


# IQ3_XXS, 98 bytes, 8 sub-blocks of 32: w = d/4·(2·s + 1)·±v, v of four
#   | 0  d | 2  64 bytes: codes | 66  8 u32: four times seven signs, s on top |
def parts_iq3_xxs(blocks: np.ndarray) -> Parts:
    words = blocks[:, 66:].view("<u4")
    codes = _signed(codebook("IQ3_XXS")[blocks[:, 2:66]], _seven_signs(words))
    return Parts(codes, half(blocks, 0) / 4 * _odd(words >> 28))


# IQ3_S, 110 bytes, 8 sub-blocks of 32: w = d·(2·s + 1)·±v, v of four
#   | 0  d | 2  64 bytes: codes | 66  8 bytes: one bit more of each | 74  32 bytes: signs |
#   | 106  4 bytes: s, low nibble first |
def parts_iq3_s(blocks: np.ndarray) -> Parts:
    top = _fields(blocks[:, 66:74], tuple(range(8)), 1).astype(np.uint16)
    vectors = codebook("IQ3_S")[blocks[:, 2:66] | top << 8]
    scale = half(blocks, 0) * _odd(_fields(blocks[:, 106:110], (0, 4), 15))
    return Parts(_signed(vectors, blocks[:, 74:106]), scale)


def _shifted(vectors: np.ndarray, is_minus: np.ndarray) -> np.ndarray:
    """8·v ± 1 of all weights, (n, 256); is_minus (n, k): of a k-th of the weights each."""
    n_blocks, k = is_minus.shape
    delta = np.where(is_minus != 0, np.int8(-1), np.int8(1))[:, :, None]
    return (vectors.reshape(n_blocks, k, -1) * np.int8(8) + delta).reshape(n_blocks, 256)


# IQ1_S, 50 bytes, 8 sub-blocks of 32: w = d·(2·s + 1)·(v ± 1/8)
#   | 0  d | 2  32 bytes: codes | 34  8 u16: three bits more of four codes, s in three, the sign |
def parts_iq1_s(blocks: np.ndarray) -> Parts:
    words = blocks[:, 34:].view("<u2")
    top = _fields(words, (0, 3, 6, 9), 7)
    vectors = codebook("IQ1_S")[blocks[:, 2:34] | top << 8]
    return Parts(_shifted(vectors, words >> 15), half(blocks, 0) / 8 * _odd(words >> 12 & 7))


# IQ1_M, 56 bytes, 16 sub-blocks of 16: w = d·(2·s + 1)·(v ± 1/8)
#   | 0  32 bytes: codes | 32  16 bytes, a nibble per code: three bits more of it and its sign |
#   | 48  4 u16: four s in three bits each, a nibble of d on top, the lowest first |
def parts_iq1_m(blocks: np.ndarray) -> Parts:
    nibbles = _fields(blocks[:, 32:48], (0, 4), 15)
    vectors = codebook("IQ1_M")[blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8]
    words = blocks[:, 48:56].view("<u2")
    d = np.bitwise_or.reduce(words >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scale = d.astype(np.uint16).view(np.float16).astype(np.float32)[:, None] / 8
    return Parts(_shifted(vectors, nibbles & 8), scale * _odd(_fields(words, (0, 3, 6, 9), 7)))
