"""Weights that are no numbers are refused at load, by every executor with the same words.

Nobody means a NaN or an infinity: it spreads to all logits, or is rounded to something harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from martlet.quant.blocks_fp4 import E8M0_NAN
from martlet.quant.formats import FORMATS
from martlet.quant.random_blocks import SCALES, Half, PowerOfTwo
from martlet.runtime.errors import FileFormatError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.numba_executor import NumbaExecutor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.rope import FREQS
from martlet.runtime.weights import StoredTensor, StoredWeights

from .tiny import BLOCK_FORMATS, TinyModel, tiny_model

EXECUTORS = (ReferenceExecutor, NumbaExecutor, NativeExecutor)
NOT_NUMBERS = {"F32": (0x7FC00000, 0xFF800000), "F16": (0x7E01, 0xFC00), "BF16": (0x7F81, 0xFF80)}
_BITS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
Executor = Callable[..., object]


def damaged(model: TinyModel, name: str, spoil: Callable[[np.ndarray], None]) -> StoredWeights:
    """The model's weights after `spoil` wrote into the bytes of one."""
    tensors = dict(model.weights._tensors)
    data = tensors[name].data.copy()
    spoil(data)
    tensors[name] = StoredTensor(tensors[name].format, tensors[name].shape, data)
    return StoredWeights(tensors)


def refusal(new: Executor, model: TinyModel, weights: StoredWeights) -> str:
    with pytest.raises(FileFormatError) as refused:
        new(record_plan(model.config, weights, 8), weights, n_blocks=4)
    return str(refused.value)


def spoilers(fmt: str, bits: int) -> Iterator[Callable[[np.ndarray], None]]:
    """What writes the bits of a half float to a block (1, bytes): as its scale, and as that of its
    offsets where it has one."""
    scale = SCALES[fmt]
    if isinstance(scale, PowerOfTwo):

        def spoil_exponent(block: np.ndarray) -> None:
            block[:, scale.at] = E8M0_NAN

        yield spoil_exponent
        return
    half = np.array([bits], np.uint16).view(np.float16)
    alone = [scale]
    if isinstance(scale, Half):
        alone = [Half(scale.at), *([Half(scale.offset[0])] if scale.offset else [])]
    for place in alone:
        yield lambda block, place=place: place.write(block, half)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00, 0x7C01])
def test_a_block_scale_that_is_no_number(fmt: str, bits: int) -> None:
    model, name = tiny_model(formats=(fmt,)), "blk.1.ffn_down.weight"
    block, n_bytes = FORMATS[fmt].block, FORMATS[fmt].nbytes
    for spoil_block in spoilers(fmt, bits):

        def spoil(
            data: np.ndarray, spoil_block: Callable[[np.ndarray], None] = spoil_block
        ) -> None:
            blocks = data.reshape(256, -1, n_bytes)  # (rows, blocks of a row, bytes)
            for row, at in ((41, 0), (40, 1)):  # the lower row counts, not the lower column
                spoil_block(blocks[row, at : at + 1])

        weights = damaged(model, name, spoil)
        for new in EXECUTORS:
            found = refusal(new, model, weights)
            assert f"{name!r} holds a value that is not finite at [40, {block}]" in found


@pytest.mark.parametrize("fmt", NOT_NUMBERS)
def test_a_plain_float_that_is_no_number(fmt: str) -> None:
    model, name = tiny_model(formats=(fmt,)), "blk.0.attn_output.weight"
    for bits in NOT_NUMBERS[fmt]:

        def spoil(data: np.ndarray, bits: int = bits) -> None:
            data.view(_BITS[fmt]).reshape(256, 256)[255, 3] = bits

        weights = damaged(model, name, spoil)
        for new in EXECUTORS:
            assert f"{name!r} holds a value that is not finite at [255, 3]" in refusal(
                new, model, weights
            )


@pytest.mark.parametrize("new", EXECUTORS)
@pytest.mark.parametrize(
    "name", ["blk.1.attn_norm.weight", "output_norm.weight", "blk.0.attn_k.bias"]
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_vector_that_holds_no_number(new: Executor, name: str, value: float) -> None:
    model = tiny_model("qwen2")

    def spoil(data: np.ndarray) -> None:
        data.view(np.float32)[7] = value

    found = refusal(new, model, damaged(model, name, spoil))
    assert f"{name!r} holds a value that is not finite at [7]" in found


def test_divisors_of_rope_that_are_no_numbers() -> None:
    model = tiny_model()
    divisors = np.ones(32, np.float32)
    divisors[3] = np.nan
    tensors = {**model.weights._tensors, FREQS: StoredTensor.from_floats(divisors)}
    with pytest.raises(FileFormatError, match=r"rope_freqs.weight' holds .* at \[3\]"):
        record_plan(model.config, StoredWeights(tensors), 8)


@pytest.mark.parametrize("fmt", ["Q4_0", "F16"])
def test_the_largest_scales_are_numbers(fmt: str) -> None:
    """What overflows later is no fault of the file's."""
    model = tiny_model(formats=(fmt,))

    def spoil(data: np.ndarray) -> None:
        data[:2] = 0xFF, 0x7B  # 65504

    weights = damaged(model, "blk.0.attn_q.weight", spoil)
    plan = record_plan(model.config, weights, 8)
    for new in EXECUTORS:
        new(plan, weights, n_blocks=4).close()
