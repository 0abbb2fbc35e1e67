"""The table of weight formats martlet can read, and decoding of whole tensors.

Owns: names, GGUF type ids and block sizes; `dequantize`. Must not know: where the bytes come from,
or how a kernel repacks them. The layouts themselves are drawn in the `blocks_*.py` files.
A new format is a reader there and a row here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import blocks_codebook as book
from . import blocks_fp4, blocks_iq, blocks_k, blocks_legacy, blocks_ternary
from .errors import FileFormatError
from .parts import Parts

# Tensors are decoded in slices of about this many weights, so that the temporary arrays of a
# decoder stay inside the CPU caches instead of doubling the memory of a large embedding.
SLICE_WEIGHTS = 1 << 17


@dataclass(frozen=True)
class Format:
    """One way of storing weights: `block` weights in `nbytes` bytes."""

    name: str
    ggml_type: int
    block: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]  # uint8 (n, nbytes) -> float32 (n, block)
    parts: Callable[[np.ndarray], Parts] | None = None  # None: plain floats

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.block

    def data_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape; exact, whatever numbers a file claims."""
        cols = shape[-1] if shape else 1
        if cols % self.block:
            raise FileFormatError(
                f"rows of {cols} weights do not fill {self.name} blocks of {self.block}"
            )
        return math.prod(shape) // self.block * self.nbytes


def _of_parts(
    name: str, ggml_type: int, block: int, nbytes: int, parts: Callable[[np.ndarray], Parts]
) -> Format:
    return Format(name, ggml_type, block, nbytes, lambda blocks: parts(blocks).weights(), parts)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("F32", 0, 1, 4, blocks_legacy.decode_f32),
        Format("F16", 1, 1, 2, blocks_legacy.decode_f16),
        Format("BF16", 30, 1, 2, blocks_legacy.decode_bf16),
        _of_parts("Q4_0", 2, 32, 18, blocks_legacy.parts_q4_0),
        _of_parts("Q4_1", 3, 32, 20, blocks_legacy.parts_q4_1),
        _of_parts("Q5_0", 6, 32, 22, blocks_legacy.parts_q5_0),
        _of_parts("Q5_1", 7, 32, 24, blocks_legacy.parts_q5_1),
        _of_parts("Q8_0", 8, 32, 34, blocks_legacy.parts_q8_0),
        _of_parts("Q2_K", 10, 256, 84, blocks_k.parts_q2_k),
        _of_parts("Q3_K", 11, 256, 110, blocks_k.parts_q3_k),
        _of_parts("Q4_K", 12, 256, 144, blocks_k.parts_q4_k),
        _of_parts("Q5_K", 13, 256, 176, blocks_k.parts_q5_k),
        _of_parts("Q6_K", 14, 256, 210, blocks_k.parts_q6_k),
        _of_parts("IQ4_NL", 20, 32, 18, blocks_iq.parts_iq4_nl),
        _of_parts("IQ4_XS", 23, 256, 136, blocks_iq.parts_iq4_xs),
        _of_parts("MXFP4", 39, 32, 17, blocks_fp4.parts_mxfp4),
        _of_parts("TQ1_0", 34, 256, 54, blocks_ternary.parts_tq1_0),
        _of_parts("TQ2_0", 35, 256, 66, blocks_ternary.parts_tq2_0),
        _of_parts("IQ1_S", 19, 256, 50, book.parts_iq1_s),
        _of_parts("IQ1_M", 29, 256, 56, book.parts_iq1_m),
        _of_parts("IQ2_XXS", 16, 256, 66, book.parts_iq2_xxs),
        _of_parts("IQ2_XS", 17, 256, 74, book.parts_iq2_xs),
        _of_parts("IQ2_S", 22, 256, 82, book.parts_iq2_s),
        _of_parts("IQ3_XXS", 18, 256, 98, book.parts_iq3_xxs),
        _of_parts("IQ3_S", 21, 256, 110, book.parts_iq3_s),
    )
}

FORMATS_BY_ID: dict[int, Format] = {fmt.ggml_type: fmt for fmt in FORMATS.values()}


def dequantize(data: np.ndarray, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 (n_bytes,) to a new float32 array of `shape`.

    Non-finite scales in the data come out as non-finite weights, without a warning.
    """
    needed = fmt.data_bytes(shape)
    if data.size != needed:
        raise FileFormatError(
            f"{fmt.name} weights of shape {shape} need {needed} bytes, got {data.size}"
        )
    blocks = data.reshape(-1, fmt.nbytes)
    out = np.empty((blocks.shape[0], fmt.block), dtype=np.float32)
    step = max(1, SLICE_WEIGHTS // fmt.block)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, blocks.shape[0], step):
            out[start : start + step] = fmt.decode(blocks[start : start + step])
    return out.reshape(shape)
