"""Random weights in any format, as bytes: valid blocks whose weights have a given spread.

For tests and for model files of a real shape whose text does not matter. Owns where the scales of
a block stand; must not know: tensors' names, files.
"""

from __future__ import annotations

import numpy as np

from .formats import FORMATS, Format

# Where the half floats of a block stand: the scale, and the offset's (byte, factor to the scale
# that centres the weights on zero).
SCALES: dict[str, tuple[int, tuple[int, float] | None]] = {
    "Q4_0": (0, None),
    "Q4_1": (0, (2, -7.5)),
    "Q5_0": (0, None),
    "Q5_1": (0, (2, -15.5)),
    "Q8_0": (0, None),
    "Q2_K": (80, (82, 1.5)),
    "Q3_K": (108, None),
    "Q4_K": (0, (2, 7.5)),
    "Q5_K": (0, (2, 15.5)),
    "Q6_K": (208, None),
    "IQ4_NL": (0, None),
    "IQ4_XS": (0, None),
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
    sample = blocks[:_N_SAMPLE].copy()
    _set_scales(fmt, sample, np.ones(len(sample)))
    scale = std / float(np.std(fmt.decode(sample)))
    d = scale * rng.uniform(0.6, 1.4, n_blocks) * rng.choice((-1, 1), n_blocks)
    _set_scales(fmt, blocks, d)
    return blocks.reshape(-1)


def _encode_floats(values: np.ndarray, format_name: str) -> np.ndarray:
    if format_name == "BF16":  # cut off the lower half: any 16 bits are a valid value
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    dtype = {"F32": "<f4", "F16": "<f2"}[format_name]
    return values.astype(dtype).view(np.uint8)


def _set_scales(fmt: Format, blocks: np.ndarray, d: np.ndarray) -> None:
    """Writes the scales d, and matching offsets, into blocks (n, nbytes)."""
    at, offset = SCALES[fmt.name]
    blocks[:, at : at + 2] = d.astype("<f2")[:, None].view(np.uint8)
    if offset is not None:
        byte, factor = offset
        blocks[:, byte : byte + 2] = (d * factor).astype("<f2")[:, None].view(np.uint8)
