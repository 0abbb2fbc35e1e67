"""Models in shards: any shard opens the whole set, and a set that disagrees is refused."""

import logging
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from martlet.quant.errors import FileFormatError
from martlet.quant.gguf_file import GGUFFile

from . import gguf_bytes as gb

ARCH = gb.pair("general.architecture", gb.STRING, gb.string("llama"))


def u16_pair(key: str, number: int) -> bytes:
    return gb.pair(key, gb.U16, struct.pack("<H", number))


def i32_pair(key: str, number: int) -> bytes:
    return gb.pair(key, gb.I32, struct.pack("<i", number))


def split_keys(number: int, count: int = 2, n_tensors: int = 2) -> list[bytes]:
    return [
        u16_pair("split.no", number),
        u16_pair("split.count", count),
        i32_pair("split.tensors.count", n_tensors),
    ]


def write_shard(
    folder: Path, number: int, keys: list[bytes], tensor: str, *, count: int = 2
) -> Path:
    """Shard `number` (from 1), holding one tensor filled with its own number."""
    path = folder / f"model-{number:05}-of-{count:05}.gguf"
    raw = gb.gguf([ARCH, *keys], [gb.tensor(tensor, [8])], bytes([number]) * 32)
    path.write_bytes(raw)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Path]:
    first = write_shard(tmp_path, 1, split_keys(0), "a")
    return first, write_shard(tmp_path, 2, split_keys(1), "b")


def refused(path: Path, says: str) -> None:
    with pytest.raises(FileFormatError, match=says):
        GGUFFile.open(path)


@pytest.mark.parametrize("opened", [0, 1])
def test_any_shard_opens_the_whole_set(shards: tuple[Path, Path], opened: int) -> None:
    with GGUFFile.open(shards[opened]) as file:
        assert [(t.name, t.data[0]) for t in file.tensors.values()] == [("a", 1), ("b", 2)]
        assert file.n_bytes == sum(path.stat().st_size for path in shards)
        assert file.metadata["split.no"] == 0


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_a_set_of_the_gguf_package_equals_the_single_file(tmp_path: Path, opened: int) -> None:
    logging.getLogger("gguf").setLevel(logging.ERROR)
    weights = {f"t{i}": np.full((2, 8), i, np.float32) for i in range(3)}
    writer = gguf.GGUFWriter(tmp_path / "set.gguf", "llama", split_max_tensors=1)
    writer.add_name("three shards")
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / f"set-{opened:05}-of-00003.gguf") as file:
        assert file.metadata["general.name"] == "three shards"
        assert list(file.tensors) == list(weights)
        for name, values in weights.items():
            assert file.tensors[name].data.tobytes() == values.tobytes()


def test_only_the_first_shard_must_state_the_tensor_count(shards: tuple[Path, Path]) -> None:
    write_shard(shards[1].parent, 2, split_keys(1)[:2], "b")
    with GGUFFile.open(shards[1]) as file:
        assert list(file.tensors) == ["a", "b"]
    write_shard(shards[0].parent, 1, split_keys(0)[:2], "a")
    refused(shards[1], r"00001-of-00002\.gguf: split\.tensors\.count is absent")


@pytest.mark.parametrize("opened", [0, 1])
def test_a_missing_shard_is_named(shards: tuple[Path, Path], opened: int) -> None:
    shards[1 - opened].unlink()
    says = rf"{shards[1 - opened].name}: shard {2 - opened} of 2 is missing"
    refused(shards[opened], says)


def test_a_damaged_shard_is_named(shards: tuple[Path, Path]) -> None:
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    refused(shards[0], rf"{shards[1].name}: tensor 'b' needs 32 bytes")


DISAGREEING = {
    "split.count": (split_keys(1, count=3), "split.count is '3', but the file name says 2"),
    "no split.count": (split_keys(1)[:1], "split.count is absent, but the file name says 2"),
    "split.no": (split_keys(0), "split.no is '0', but the file name says 1"),
    "split.tensors.count": (
        split_keys(1, n_tensors=3),
        "split.tensors.count is '3', but the set has tensors: 2",
    ),
    "split.no as text": (
        [gb.pair("split.no", gb.STRING, gb.string("1")), *split_keys(1)[1:]],
        "split.no is '1', but the file name says 1",
    ),
    "split.count as array": (
        [gb.pair("split.count", gb.ARRAY, gb.array(gb.U8, [b"\2", b"\2"]))],
        "split.count is '.2 2.', but the file name says 2",
    ),
}


@pytest.mark.parametrize(("keys", "says"), DISAGREEING.values(), ids=DISAGREEING)
@pytest.mark.parametrize("opened", [0, 1])
def test_a_disagreeing_shard_is_named(
    shards: tuple[Path, Path], opened: int, keys: list[bytes], says: str
) -> None:
    write_shard(shards[1].parent, 2, keys, "b")
    refused(shards[opened], f"{shards[1].name}: {says}")


def test_a_tensor_in_two_shards_is_refused(shards: tuple[Path, Path]) -> None:
    write_shard(shards[1].parent, 2, split_keys(1), "a")
    refused(shards[0], rf"{shards[1].name}: tensor 'a' is also in .*{shards[0].name}")


@pytest.mark.parametrize("number", [0, 3])
def test_a_number_outside_the_set_is_refused(tmp_path: Path, number: int) -> None:
    path = write_shard(tmp_path, number, split_keys(0), "a")
    refused(path, f"the name says shard {number} of 2")


def test_a_renamed_shard_is_refused(shards: tuple[Path, Path]) -> None:
    """Its siblings cannot be found, and alone it is not a model."""
    refused(shards[0].rename(shards[0].with_name("renamed.gguf")), "split.count is '2'.*give all")


@pytest.mark.parametrize("keys", [[], split_keys(0, count=1, n_tensors=1), split_keys(0, count=0)])
def test_a_set_of_one_is_a_plain_file(tmp_path: Path, keys: list[bytes]) -> None:
    """A count of 0 is what merging a set leaves behind."""
    path = write_shard(tmp_path, 1, keys, "a", count=1)
    for name in (path.name, "plain.gguf"):
        path = path.rename(path.with_name(name))
        with GGUFFile.open(path) as file:
            assert list(file.tensors) == ["a"]
