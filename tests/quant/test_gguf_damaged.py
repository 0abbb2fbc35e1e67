"""Cut files, flipped bytes, and paths that are no files: refused with a typed error, or read."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.errors import FileFormatError, MartletError
from martlet.quant.gguf_file import GGUFFile

from . import gguf_bytes as gb

ARCH = gb.pair("general.architecture", gb.STRING, gb.string("llama"))


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    raw = gb.tiny()
    path.write_bytes(raw)
    GGUFFile.open(path).close()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(
            FileFormatError, match=rf"file of {size} bytes|file has {size}|is empty"
        ):
            GGUFFile.open(path)


def test_a_file_cut_inside_its_last_padding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "padding.gguf"
    raw = gb.gguf([ARCH], [gb.tensor("a", [1])], bytes(32))
    for size in range(len(raw) - 31, len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(FileFormatError, match="with padding, but the file has"):
            GGUFFile.open(path)
    path.write_bytes(raw + b"what follows is not ours")
    GGUFFile.open(path).close()


def open_or_refuse(path: Path, raw: bytes) -> None:
    """Anything but a typed error is a bug; a file that opens must keep its tensors inside."""
    path.write_bytes(raw)
    with suppress(MartletError), GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            assert tensor.n_bytes == tensor.format.data_bytes(tensor.shape) <= len(raw)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One path for all examples of a property; each example overwrites it."""
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"


@settings(deadline=None, max_examples=400)
@given(flips=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_never_raise_anything_untyped(
    scratch: Path, flips: list[tuple[int, int]]
) -> None:
    raw = bytearray(gb.tiny())
    for at, byte in flips:
        raw[at % len(raw)] = byte
    open_or_refuse(scratch, bytes(raw))


def test_each_byte_at_its_extremes_never_raises_anything_untyped(scratch: Path) -> None:
    raw = gb.tiny()
    for at in range(len(raw)):
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            open_or_refuse(scratch, raw[:at] + bytes([byte]) + raw[at + 1 :])


@settings(deadline=None, max_examples=200)
@given(tail=st.binary(max_size=200))
def test_random_bytes_after_the_version_never_raise_anything_untyped(
    scratch: Path, tail: bytes
) -> None:
    open_or_refuse(scratch, b"GGUF\x03\0\0\0" + tail)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"absent\.gguf: cannot be read: No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(FileFormatError, match="is not a regular file"):
        GGUFFile.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FileFormatError, match="is not a regular file"):
        GGUFFile.open(tmp_path / "pipe.gguf")
