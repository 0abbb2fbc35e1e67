"""Random weights in any format, as bytes: valid blocks whose weights have a given spread.

For tests and for model files of a real shape whose text does not matter. Owns where the scales of
a block stand; must not know: tensors' names, files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formats import FORMATS


@dataclass(frozen=True)
class Half:
    """The scale is a half float at byte `at`, another one scales the offsets."""

    at: int
    offset: tuple[int, float] | None = None
    """Its byte, and its factor to the scale that centres the weights on zero."""

    def write(self, blocks: np.ndarray, d: np.ndarray, factor: float | None = None) -> None:
        blocks[:, self.at : self.at + 2] = _half_bytes(d)
        if self.offset is not None:
            byte, centring = self.offset
            blocks[:, byte : byte + 2] = _half_bytes(d * (centring if factor is None else factor))


@dataclass(frozen=True)
class SplitHalf:
    """The nibbles of a half float stand in the upper ones of four bytes from `at` on, two apart."""

    at: int

    def write(self, blocks: np.ndarray, d: np.ndarray, factor: float | None = None) -> None:
        bits = d.astype("<f2").view("<u2")[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        places = np.s_[:, self.at + 1 : self.at + 8 : 2]
        blocks[places] = (blocks[places] & 15) | (bits << 4).astype(np.uint8)


@dataclass(frozen=True)
class PowerOfTwo:
    """The scale is a power of two, 2^(e - 127) with e the byte at `at`."""

    at: int

    def write(self, blocks: np.ndarray, d: np.ndarray, factor: float | None = None) -> None:
        """Rounds |d| up or down by its last bits, so that the mean square of many stays."""
        fraction, exponent = np.frexp(np.abs(d))  # d = fraction·2^exponent, fraction in [1/2, 1)
        chance = np.modf(fraction * 2.0**20)[0]
        is_up = chance < (4 * fraction**2 - 1) / 3
        blocks[:, self.at] = np.where(d == 0, 0, exponent - 1 + is_up + 127)


SCALES: dict[str, Half | SplitHalf | PowerOfTwo] = {
    "Q4_0": Half(0),
    "Q4_1": Half(0, (2, -7.5)),
    "Q5_0": Half(0),
    "Q5_1": Half(0, (2, -15.5)),
    "Q8_0": Half(0),
    "Q2_K": Half(80, (82, 1.5)),
    "Q3_K": Half(108),
    "Q4_K": Half(0, (2, 7.5)),
    "Q5_K": Half(0, (2, 15.5)),
    "Q6_K": Half(208),
    "IQ4_NL": Half(0),
    "IQ4_XS": Half(0),
    "MXFP4": PowerOfTwo(0),
    "TQ1_0": Half(52),
    "TQ2_0": Half(64),
    "IQ1_S": Half(0),
    "IQ1_M": SplitHalf(48),
    "IQ2_XXS": Half(0),
    "IQ2_XS": Half(0),
    "IQ2_S": Half(0),
    "IQ3_XXS": Half(0),
    "IQ3_S": Half(0),
}
BLOCK_FORMATS = tuple(SCALES)
_N_SAMPLE = 64  # blocks from which the spread at a scale of one is taken


def random_weights(
    format_name: str, n_weights: int, rng: np.random.Generator, std: float = 1.0
) -> np.ndarray:
    """uint8 (n_bytes,): n_weights of about this standard deviation, scales of either sign."""
    fmt = FORMATS[format_name]
    if fmt.block == 1:
        values = (rng.standard_normal(n_weights) * std).astype(np.float32)
        return _encode_floats(values, format_name)
    n_blocks = fmt.data_bytes((n_weights,)) // fmt.nbytes
    blocks = rng.integers(0, 256, (n_blocks, fmt.nbytes), dtype=np.uint8)
    if format_name == "TQ2_0":
        threes = blocks & blocks >> 1 & 0x55  # no ternary value: they become 1, which is zero
        blocks ^= threes << 1
    sample = blocks[:_N_SAMPLE].copy()
    SCALES[format_name].write(sample, np.ones(len(sample)))
    scale = std / float(np.std(fmt.decode(sample)))
    d = scale * rng.uniform(0.6, 1.4, n_blocks) * rng.choice((-1, 1), n_blocks)
    SCALES[format_name].write(blocks, d)
    return blocks.reshape(-1)


def _encode_floats(values: np.ndarray, format_name: str) -> np.ndarray:
    if format_name == "BF16":  # cut off the lower half: any 16 bits are a valid value
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    dtype = {"F32": "<f4", "F16": "<f2"}[format_name]
    return values.astype(dtype).view(np.uint8)


def _half_bytes(d: np.ndarray) -> np.ndarray:
    return d.astype("<f2")[:, None].view(np.uint8)
