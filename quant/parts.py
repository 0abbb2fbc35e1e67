"""What a block holds: small integers, and the scales and offsets that make them weights.

Owns: that shape, and weights from it. Must not know: how bytes are laid out. The readers of the
`blocks_*.py` files give it for blocks of their format; kernels that repack blocks start from it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Parts(NamedTuple):
    """weight = scale·code + offset."""

    codes: np.ndarray  # int8 (n_blocks, weights of a block)
    scale: np.ndarray  # float32 (n_blocks, k), each for a k-th of the block's weights, in order
    offset: np.ndarray | None = None  # as scale

    def weights(self) -> np.ndarray:
        """float32 (n_blocks, weights of a block)."""
        n_blocks, n_scales = self.scale.shape
        codes = self.codes.reshape(n_blocks, n_scales, -1).astype(np.float32)
        weights = self.scale[:, :, None] * codes
        if self.offset is not None:
            weights += self.offset[:, :, None]
        return weights.reshape(n_blocks, -1)
