"""Checkpoint folders from strangers: whole ones open, damaged ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.checkpoint import INDEX, MAX_TEXT_BYTES, Checkpoint
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError
from martlet.quant.safetensors_file import SafetensorsFile
from safetensors.numpy import load_file, save_file

from ..recorded import RECORDED, TINY
from .checkpoints import copied, write_raw, write_safetensors

ONE = {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def changed(**changes: Any) -> dict[str, Any]:
    return {"x": {**ONE["x"], **changes}}


def test_rows_equal_those_of_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((5, 3)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    tensors = SafetensorsFile.open(tmp_path / "m.safetensors").tensors
    for name, array in load_file(tmp_path / "m.safetensors").items():
        assert tensors[name].shape == array.shape
        rows = tensors[name].rows(slice(None))
        assert rows.dtype == np.float32
        assert np.array_equal(rows.reshape(array.shape), array.astype(np.float32))
    assert np.array_equal(tensors["a"].rows(np.array([4, 0])), arrays["a"][[4, 0]])


def test_bf16_is_the_upper_half_of_a_float(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000, 0x7F80, 0x0001]], np.uint16)
    path = write_safetensors(tmp_path / "m.safetensors", {"x": bits})
    [row] = SafetensorsFile.open(path).tensors["x"].rows(slice(None))
    assert row.tolist() == [1.0, -2.0, np.inf, 2.0**-133]


@pytest.mark.parametrize("name", TINY)
def test_recorded_checkpoints_open(name: str) -> None:
    checkpoint = Checkpoint.open(RECORDED / name)
    names = ("embed_tokens.weight", "embeddings.weight")
    assert any(tensor.endswith(names) for tensor in checkpoint.tensors)


@pytest.mark.parametrize(
    ("header", "data", "told"),
    [
        (b"[]", b"", "not a JSON object"),
        (b"{", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"a": 1, "a": 2}', b"", "appears twice"),
        ({"x": 5}, b"", "no JSON object"),
        (changed(dtype="F33"), bytes(16), "unknown type"),
        (changed(dtype=["F32"]), bytes(16), "unknown type"),
        (changed(shape=[2**40, 2**40]), bytes(16), "needs"),
        (changed(shape=[10**4000] * 8), bytes(16), "whole numbers"),
        (changed(data_offsets=[0, 10**4000]), bytes(16), "expected [begin, end]"),
        (changed(shape=[-2, -2]), bytes(16), "whole numbers"),
        (changed(shape=[True, 4]), bytes(16), "whole numbers"),
        (changed(shape=[1] * 9), bytes(16), "at most 8"),
        (changed(data_offsets=[0, 12]), bytes(16), "its place has 12"),
        (changed(data_offsets=[16, 0]), bytes(16), "expected [begin, end]"),
        (changed(data_offsets=[0, 2**62]), bytes(16), "its place has"),
        (changed(data_offsets=[4, 20]), bytes(20), "begins at 4"),
        (ONE, bytes(15), "cut short"),
        (ONE, bytes(17), "17 bytes of data"),
        ({**ONE, "y": ONE["x"]}, bytes(16), "begins at 0"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: Any, data: bytes, told: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(MartletError, match=r"model\.safetensors: ") as refusal:
        Checkpoint.open(tmp_path)
    assert told in str(refusal.value)


@pytest.mark.parametrize("length", [0, 7, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little")[: max(length, 1)] if length < 8 else b"")
    if length >= 8:
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(FileFormatError):
        SafetensorsFile.open(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = write_safetensors(tmp_path / "w", {"x": np.ones((2, 3), np.float32)}).read_bytes()
    for n_bytes in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:n_bytes])
        with pytest.raises(FileFormatError):
            SafetensorsFile.open(tmp_path / "cut")


# B28: an interrupted download.


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileFormatError, match=r"shard 'model-00002-of-00003\.safetensors' is missing"
    ):
        Checkpoint.open(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(FileFormatError, match=r"'model\.extra\.weight'"):
        Checkpoint.open(folder)


def test_a_shard_with_a_tensor_the_index_lacks(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(FileFormatError, match=r"'model\.norm\.weight'"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd"])
def test_an_index_may_not_point_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(FileFormatError, match="not a plain file name"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", ".."])
def test_names_that_no_file_could_have_are_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(FileFormatError, match="is missing"):
        Checkpoint.open(tmp_path)


def test_an_index_without_end_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / INDEX, "wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)  # a hole; takes no room
    with pytest.raises(FileFormatError, match=f"at most {MAX_TEXT_BYTES} are read"):
        Checkpoint.open(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="has neither"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path)
    with pytest.raises(FileFormatError, match="not a folder"):
        Checkpoint.open(tmp_path / "pytorch_model.bin")
