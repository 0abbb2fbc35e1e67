"""Block decoders: bit-exact against the `gguf` package, and by hand where a person can check."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.blocks_fp4 import E8M0_NAN
from martlet.quant.errors import FileFormatError
from martlet.quant.formats import FORMATS, FORMATS_BY_ID, SLICE_WEIGHTS, Format, dequantize
from martlet.quant.random_blocks import SCALES

EACH_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def random_blocks(fmt: Format, n_blocks: int, seed: int) -> np.ndarray:
    """Random bytes (n_blocks, nbytes) whose scales are any finite value, of either sign."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n_blocks, fmt.nbytes), dtype=np.uint8)
    if fmt.name == "F16":
        blocks[:, :] = random_halves(rng, n_blocks).view(np.uint8).reshape(n_blocks, 2)
    elif fmt.name == "MXFP4":
        blocks[:, 0] %= 251  # beyond, the largest values are infinite
    elif fmt.block > 1:
        offset_factor = float(rng.uniform(-2, 2))
        SCALES[fmt.name].write(blocks, random_halves(rng, n_blocks) / 2, offset_factor)
    return blocks


def random_halves(rng: np.random.Generator, n: int) -> np.ndarray:
    halves = rng.integers(0, 0x7C00, n, dtype=np.uint16)
    halves |= rng.integers(0, 2, n, dtype=np.uint16) << 15
    return halves.view("<f2")


def oracle(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    qtype = gguf.GGMLQuantizationType(fmt.ggml_type)
    source = blocks
    if fmt.name in ("F32", "F16"):  # the package expects these as typed arrays
        source = blocks.view("<f4" if fmt.name == "F32" else "<f2")
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(source, qtype).astype(np.float32)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(
        np.ascontiguousarray(left).view(np.uint32), np.ascontiguousarray(right).view(np.uint32)
    )


@EACH_FORMAT
def test_table_agrees_with_the_gguf_package(fmt: Format) -> None:
    qtype = gguf.GGMLQuantizationType[fmt.name]
    assert (fmt.ggml_type, (fmt.block, fmt.nbytes)) == (qtype, gguf.GGML_QUANT_SIZES[qtype])
    assert FORMATS_BY_ID[fmt.ggml_type] is fmt
    assert fmt.bits_per_weight == 8 * fmt.nbytes / fmt.block


@EACH_FORMAT
@settings(deadline=None)
@given(n_blocks=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_decoding_is_bit_exact_on_random_bytes(fmt: Format, n_blocks: int, seed: int) -> None:
    blocks = random_blocks(fmt, n_blocks, seed)
    decoded = fmt.decode(blocks)
    assert (decoded.shape, decoded.dtype) == ((n_blocks, fmt.block), np.float32)
    assert same_bits(decoded, oracle(blocks, fmt))


@EACH_FORMAT
def test_every_byte_of_a_block_matters(fmt: Format) -> None:
    """A byte that changes nothing would mean a field read from the wrong place."""
    blocks = random_blocks(fmt, 1, seed=5)
    if fmt.block > 1:
        SCALES[fmt.name].write(blocks, np.ones(1), 1.0)
    before = fmt.decode(blocks)
    for byte in range(fmt.nbytes):
        changed = blocks.copy()
        changed[0, byte] ^= 0x11  # one bit of each nibble
        assert not same_bits(before, fmt.decode(changed)), f"byte {byte}"


@EACH_FORMAT
def test_whole_tensors_decode_across_slices(fmt: Format) -> None:
    """A size that is no multiple of the slice, from a start that is not aligned."""
    cols, rows = fmt.block * 4, SLICE_WEIGHTS // (fmt.block * 4) + 1
    blocks = random_blocks(fmt, rows * 4, seed=1)
    raw = np.concatenate((np.zeros(1, np.uint8), blocks.reshape(-1)))[1:]
    raw.flags.writeable = False
    weights = dequantize(raw, fmt, (rows, cols))
    assert same_bits(weights, oracle(blocks, fmt).reshape(rows, cols))
    assert weights.flags.writeable
    assert not np.shares_memory(weights, raw)


def test_q4_0_by_hand() -> None:
    block = np.frombuffer(b"\x00\xc0" + bytes([0x2F]) + bytes([0x88] * 15), np.uint8)  # d = -2
    weights = dequantize(block, FORMATS["Q4_0"], (32,))
    assert weights[0] == -2.0 * (15 - 8)
    assert weights[16] == -2.0 * (2 - 8)
    assert not weights[1:16].any()


def test_q6_k_by_hand() -> None:
    block = np.zeros((1, 210), np.uint8)
    block[0, 0], block[0, 128] = 0x07, 0b01  # weight 0: q = 7 + 16·1 = 23
    block[0, 192], block[0, 208:] = 0xFE, (0x00, 0x38)  # s = -2, d = 0.5
    assert FORMATS["Q6_K"].decode(block)[0, 0] == 0.5 * -2 * (23 - 32)


def test_mxfp4_by_hand() -> None:
    block = np.frombuffer(bytes([128, 0xD7] + [0] * 15), np.uint8)  # scale 2
    weights = dequantize(block, FORMATS["MXFP4"], (32,))
    assert (weights[0], weights[16]) == (2 * 6.0, 2 * -3.0)
    nan = np.frombuffer(bytes([E8M0_NAN] + [0x11] * 16), np.uint8)
    assert np.isnan(dequantize(nan, FORMATS["MXFP4"], (32,))).all()


def test_an_infinite_scale_passes_through_without_a_warning() -> None:
    block = np.frombuffer(b"\x00\x7c" + bytes([0x80] * 16), np.uint8)
    weights = dequantize(block, FORMATS["Q4_0"], (32,))
    assert np.isneginf(weights[0])
    assert np.isnan(weights[16])  # inf · 0


def test_wrong_sizes_are_refused_with_both_numbers() -> None:
    q4_0 = FORMATS["Q4_0"]
    with pytest.raises(FileFormatError, match=r"\(2, 32\) need 36 bytes, got 35"):
        dequantize(np.zeros(35, np.uint8), q4_0, (2, 32))
    with pytest.raises(FileFormatError, match="rows of 48 weights do not fill Q4_0 blocks of 32"):
        dequantize(np.zeros(54, np.uint8), q4_0, (2, 48))


@EACH_FORMAT
def test_sizes_are_exact_beyond_64_bits(fmt: Format) -> None:
    shape = (2**62, 2**62, fmt.block)
    assert fmt.data_bytes(shape) == 2**124 * fmt.nbytes
