"""llama.cpp's importance files of both forms; damaged ones are refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.errors import FileFormatError
from martlet.quant.formats import FORMATS
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_write import OutTensor, write_gguf
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("datasets", 5),
        ("datasets", "text"),
        ("datasets", [1, 2]),
        ("chunk_count", "many"),
        ("chunk_count", [1]),
        ("chunk_count", float("inf")),
        ("chunk_count", 1.5),
        ("chunk_count", True),
    ],
)
def test_what_is_said_of_the_text_has_its_type(tmp_path: Path, key: str, value: Any) -> None:
    fields = {"general.type": Field.string("imatrix"), f"imatrix.{key}": Field.of(value)}
    values = {"a.in_sum2": np.ones((1, 4), np.float32), "a.counts": np.ones((1, 1), np.float32)}
    tensors = [OutTensor(n, v.shape, FORMATS["F32"], v.copy) for n, v in values.items()]
    write_gguf(tmp_path / "i.gguf", fields, tensors)
    with pytest.raises(FileFormatError, match=r"i\.gguf: (imatrix\.datasets is|claims .* chunks)"):
        read_imatrix(tmp_path / "i.gguf")


@pytest.mark.parametrize("count", [np.nan, np.inf, -1.0, 1e-45])
def test_counts_that_are_none_are_refused(tmp_path: Path, count: float) -> None:
    """As zeros they would make the importance even, or nothing at all."""
    path = tmp_path / "i.gguf"
    write_imatrix(path, {"a": np.array([[2.0, 4.0]])}, {"a": np.array([[count]])})
    with pytest.raises(FileFormatError, match=r"of a (is|are) not all finite and ≥ 0"):
        read_imatrix(path)


def test_the_older_form_with_numbers_out_of_range(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    entry = {"a": (1, np.array([1.0]))}
    path.write_bytes(legacy_imatrix(entry, struct.pack("<ii", -3, 1) + b"t"))
    with pytest.raises(FileFormatError, match="claims -3 chunks"):
        read_imatrix(path)
    path.write_bytes(legacy_imatrix({"a" * 5000: entry["a"]}))
    with pytest.raises(FileFormatError, match="a name of 5000 bytes, at most 4096"):
        read_imatrix(path)
