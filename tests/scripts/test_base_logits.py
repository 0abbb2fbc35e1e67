"""Files of base logits: the layout byte by byte, what 16 bits keep, and damaged files."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from martlet.quant import whole_file
from martlet.quant.errors import FileFormatError, NoSpace
from martlet.runtime.errors import ModelError
from martlet.scripts.base_logits import (
    BaseLogits,
    decode,
    encode,
    file_bytes,
    is_base_logits,
    write_base_logits,
)
from martlet.scripts.logit_stats import log_softmax

CHUNKS = [[1, 2, 0, 1, 2, 0], [2, 2, 1, 1, 0, 0]]  # 2 scored tokens each


def write(path: Path, n_vocab: int = 3) -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 3, (4, n_vocab)).astype(np.float32)
    write_base_logits(path, CHUNKS, n_vocab, [logits[:1], logits[1:]])
    return logits


def test_the_layout_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "base"
    logits = np.float32([[0, math.log(2), -math.inf]])
    write_base_logits(path, [[0, 1, 2, 0]] * 2, 3, [logits, logits])
    content = path.read_bytes()
    assert content[:8] == b"_logits_"
    assert struct.unpack("<3i8i", content[8:52]) == (4, 3, 2, 0, 1, 2, 0, 0, 1, 2, 0)
    scale, least, *values = struct.unpack("<2f4H", content[52:68])
    assert scale == pytest.approx(16 / 65535)
    # the largest has p = 2/3; 16 below it is the least that is kept
    assert least == pytest.approx(math.log(2 / 3) - 16)
    assert values[1] == 65535
    assert values[0] == round((16 - math.log(2)) / scale)
    assert values[2:] == [0, 0]  # below the range; padding
    assert content[52:68] == content[68:]
    assert len(content) == file_bytes(4, 3, 2)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "base"
    logits = write(path)
    assert is_base_logits(str(path))
    file = BaseLogits.open(path)
    assert (file.n_vocab, file.n_ctx, file.tokens.tolist()) == (3, 6, CHUNKS)
    found = np.concatenate([file.rows(0, slice(0, 2)), file.rows(1, slice(0, 1))])
    assert found == pytest.approx(log_softmax(logits)[:3], abs=1e-3)


@pytest.mark.filterwarnings("error")
@given(arrays.arrays(np.float32, (3, 5), elements=st.floats(-12, 3, width=32)))
@example(np.array([[0, 1e-40, 0, 0, 0]] * 3, np.float32))
def test_16_bits_keep_half_a_step(logits: np.ndarray) -> None:
    exact = log_softmax(logits)
    step = (logits.max(axis=1) - logits.min(axis=1)) / 65535
    error = np.abs(decode(encode(logits), 5) - exact)
    assert (error <= step[:, None] / 2 + 4e-6).all()  # and float32 of ln p


def test_equal_logits_have_no_range() -> None:
    assert decode(encode(np.zeros((1, 4), np.float32)), 4) == pytest.approx(math.log(1 / 4))


Damage = Callable[[bytes], bytes]


def with_head(n_ctx: int, n_vocab: int, n_chunks: int) -> Damage:
    return lambda content: content[:8] + struct.pack("<3i", n_ctx, n_vocab, n_chunks) + content[20:]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: b"GGUF" + content[4:], "no file of base logits"),
        (lambda content: content[:10], "no file of base logits"),
        (lambda content: content[:-1], r"has \d+ bytes.*need \d+"),
        (lambda content: content + b"\0", r"has \d+ bytes.*need \d+"),
        (with_head(6, 3, -1), "-1 chunks"),
        (with_head(6, 0, 2), "from 0"),
        (with_head(6, 2**31 - 1, 2), "damaged"),
        (with_head(2**31 - 1, 3, 2**31 - 1), "need"),
        (with_head(2, 3, 2), "of 2 tokens"),
        (lambda content: content[:20] + struct.pack("<i", 3) + content[24:], "outside 0..2"),
        (lambda content: content[:20] + struct.pack("<i", -1) + content[24:], "outside 0..2"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Damage, told: str) -> None:
    path = tmp_path / "base"
    write(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FileFormatError, match=told):
        BaseLogits.open(path)


def test_values_that_are_no_numbers_are_told_by_chunk(tmp_path: Path) -> None:
    path = tmp_path / "base"
    write(path)
    content = bytearray(path.read_bytes())
    content[-16:-12] = struct.pack("<f", math.nan)
    path.write_bytes(content)
    file = BaseLogits.open(path)
    file.rows(0, slice(0, 2))
    with pytest.raises(FileFormatError, match="chunk 1"):
        file.rows(1, slice(0, 2))


def test_probabilities_above_one_are_told_by_chunk(tmp_path: Path) -> None:
    path = tmp_path / "base"
    write(path)
    content = bytearray(path.read_bytes())
    content[-12:-8] = struct.pack("<f", 0.5)  # the least ln p of the last scored token
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="chunk 1 has probabilities above 1"):
        BaseLogits.open(path).rows(1, slice(0, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_base_without_a_distribution_is_not_written(tmp_path: Path, value: float) -> None:
    logits = np.array([[0, value, 1]] * 4, np.float32)
    with pytest.raises(ModelError, match="not finite"):
        write_base_logits(tmp_path / "base", CHUNKS, 3, [logits])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_for_the_file(tmp_path: Path) -> None:
    write(tmp_path / "new" / "base")
    assert is_base_logits(str(tmp_path / "new" / "base"))


def test_a_full_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match=r"needs \d+ MiB; free some, or take fewer --chunks$"):
        write(tmp_path / "base")


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def logits() -> object:
        yield np.zeros((1, 3), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_base_logits(tmp_path / "base", CHUNKS, 3, logits())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
