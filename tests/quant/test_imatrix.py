"""llama.cpp's importance files of both forms; damaged ones are refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError
from martlet.quant.imatrix import read_imatrix

from . import gguf_bytes
from .imatrix_bytes import legacy_imatrix, write_imatrix


def test_sums_are_divided_by_counts_and_unseen_experts_count_evenly(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    sums = {"a": np.array([[2.0, 4.0]]), "experts": np.array([[8.0, 0.0], [0.0, 0.0]])}
    counts = {"a": np.array([[2.0]]), "experts": np.array([[4.0], [0.0]])}
    write_imatrix(path, sums, counts)
    read = read_imatrix(path)
    assert read.importance["a"].tolist() == [[1, 2]]
    assert read.importance["experts"].tolist() == [[2, 0], [1, 1]]
    assert (read.datasets, read.n_chunks) == (["some.txt"], 3)


def test_a_single_matrix_as_llama_imatrix_writes_it(tmp_path: Path) -> None:
    """GGUF drops the dimension of 1: sums are (cols,), counts (1,)."""
    path = tmp_path / "i.gguf"
    write_imatrix(path, {"a": np.array([2.0, 4.0])}, {"a": np.array([2.0])})
    assert read_imatrix(path).importance["a"].tolist() == [[1, 2]]


@pytest.mark.parametrize("with_trailer", [False, True])
def test_the_older_form(tmp_path: Path, with_trailer: bool) -> None:
    path = tmp_path / "i.dat"
    trailer = struct.pack("<ii", 5, 4) + b"text" if with_trailer else b""
    path.write_bytes(legacy_imatrix({"a": (2, np.array([2.0, 4.0]))}, trailer))
    read = read_imatrix(path)
    assert read.importance["a"].tolist() == [[1, 2]]
    assert (read.datasets, read.n_chunks) == ((["text"], 5) if with_trailer else ([], 0))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    whole = legacy_imatrix({"a": (2, np.array([2.0, 4.0]))})
    for raw in (*(whole[:n] for n in range(len(whole))), b"\xff" * 40):
        path.write_bytes(raw)
        with pytest.raises(FileFormatError, match=r"i\.dat: (is no imatrix|holds no)"):
            read_imatrix(path)
    path.write_bytes(legacy_imatrix({"a": (1, np.array([1.0, np.nan]))}))
    with pytest.raises(FileFormatError, match="importance of a is not all finite"):
        read_imatrix(path)
    path.write_bytes(gguf_bytes.tiny())
    with pytest.raises(FileFormatError, match="not an imatrix"):
        read_imatrix(path)
    write_imatrix(path, {"a": np.ones((2, 4))}, {"a": np.ones((1, 1))})
    with pytest.raises(FileFormatError, match="no counts for its matrices"):
        read_imatrix(path)
