"""The writer of GGUF files: what it writes is read back, by us and by the `gguf` package; what it
refuses leaves nothing behind."""

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from martlet.quant import whole_file
from martlet.quant.errors import FileFormatError, InUse, NoSpace, NotAFile
from martlet.quant.formats import FORMATS
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_part import read_stored_fields
from martlet.quant.gguf_write import OutTensor, write_gguf

from . import gguf_bytes

FIELDS = {
    "general.architecture": Field.string("llama"),
    "a.uint32": Field.uint32(2**32 - 1),
    "a.int8": Field.number(-3, gguf_bytes.I8),
    "a.uint64": Field.number(2**64 - 1, gguf_bytes.U64),
    "a.float": Field.float32(0.1),
    "a.bool": Field.boolean(True),
    "a.strings": Field.strings(["a", "", "\udce2\udc96"]),
    "a.empty": Field.strings([]),
    "a.ints": Field.numbers([1, -2], gguf_bytes.I32),
    "a.bools": Field.booleans([True, False]),
    "a.array": Field.of(np.array([1.5, 2.5], np.float64)),
}


def tensor(
    name: str = "w", shape: tuple[int, ...] = (2, 32), format_name: str = "Q8_0", byte: int = 1
) -> OutTensor:
    fmt = FORMATS[format_name]
    return OutTensor(name, shape, fmt, lambda: np.full(fmt.data_bytes(shape), byte, np.uint8))


TENSORS = [tensor("a"), tensor("b", (3,), "F32", 2), tensor("c", (2, 3, 256), "Q6_K", 3)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, seen = tmp_path / "new" / "m.gguf", []
    n_bytes = write_gguf(path, FIELDS, TENSORS, on_tensor=lambda t: seen.append(t.name))
    assert n_bytes == path.stat().st_size
    assert seen == ["a", "b", "c"]
    assert read_stored_fields(path) == FIELDS
    with GGUFFile.open(path) as file:
        assert file.metadata["a.uint64"] == 2**64 - 1
        assert file.metadata["a.strings"] == ["a", "", "\udce2\udc96"]
        assert file.metadata["a.array"].dtype == np.float64
        for wanted, got in zip(TENSORS, file.tensors.values(), strict=True):
            assert (got.name, got.shape, got.format) == (wanted.name, wanted.shape, wanted.format)
            assert (got.data == wanted.data()).all()
    assert [entry.name for entry in path.parent.iterdir()] == ["m.gguf"]


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    fields = {key: field for key, field in FIELDS.items() if key != "a.empty"}
    write_gguf(path, fields, TENSORS)
    reader = gguf.GGUFReader(path)
    assert reader.fields["a.ints"].contents() == [1, -2]
    assert reader.fields["a.uint64"].contents() == 2**64 - 1
    for wanted, got in zip(TENSORS, reader.tensors, strict=True):
        assert (got.name, tuple(got.shape.tolist()[::-1])) == (wanted.name, wanted.shape)
        assert (got.data.reshape(-1).view(np.uint8) == wanted.data()).all()


def test_every_stored_value_can_be_copied(tmp_path: Path) -> None:
    source, copy = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    source.write_bytes(gguf_bytes.tiny())
    with GGUFFile.open(source) as file:
        tensors = [
            OutTensor(t.name, t.shape, t.format, lambda t=t: t.data) for t in file.tensors.values()
        ]
        write_gguf(copy, read_stored_fields(source), tensors)
    assert copy.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("alignment", [8, 32, 512])
def test_tensors_start_at_multiples_of_the_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"general.alignment": Field.uint32(alignment)}, TENSORS)
    with GGUFFile.open(path) as file:  # checks the place of every tensor
        assert file.alignment == alignment
    assert path.stat().st_size % alignment == 0


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, [tensor("a"), tensor("a")], "tensor 'a' appears twice"),
        ({}, [tensor("")], "has 0 bytes"),
        ({"": Field.uint32(1)}, [], "has 0 bytes"),
        ({"\ud800": Field.uint32(1)}, [], "is not UTF-8"),
        ({}, [tensor("a", (1, 1, 1, 1, 32))], "1 to 4 dimensions"),
        ({}, [tensor("a", (0, 32))], "1 to 4 dimensions"),
        ({}, [OutTensor("a", (2, 48), FORMATS["Q8_0"], np.array)], "'a': rows of 48 weights"),
        ({"general.alignment": Field.uint32(48)}, [], "must be a power of two"),
        ({"general.alignment": Field.of("32")}, [], "must be a uint32"),
        ({}, [OutTensor("a", (2,), FORMATS["F32"], lambda: np.zeros(3, "f4"))], "8 bytes, got 12"),
    ],
)
def test_what_no_reader_accepts_is_refused(
    tmp_path: Path, fields: dict[str, Field], tensors: list[OutTensor], message: str
) -> None:
    with pytest.raises(FileFormatError, match=message):
        write_gguf(tmp_path / "m.gguf", fields, tensors)
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_middle_keeps_the_old_file(tmp_path: Path) -> None:
    def broken() -> np.ndarray:
        raise KeyboardInterrupt

    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, {}, [tensor("a"), OutTensor("b", (2,), FORMATS["F32"], broken)])
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    place = tmp_path / "place"
    make(place)
    before = place.stat()
    with pytest.raises(NotAFile, match="place is no regular file"):
        write_gguf(place, {}, TENSORS)
    assert place.stat() == before
    assert list(tmp_path.iterdir()) == [place]


def test_what_a_check_refuses_never_has_its_name(tmp_path: Path) -> None:
    path, seen = tmp_path / "m.gguf", []

    def refuse(whole: Path) -> None:
        with GGUFFile.open(whole) as file:
            seen.extend(file.tensors)
        raise FileFormatError("not like this")

    path.write_bytes(b"old")
    with pytest.raises(FileFormatError, match="not like this"):
        write_gguf(path, FIELDS, TENSORS, check=refuse)
    assert seen == ["a", "b", "c"]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path, alone = tmp_path / "m.gguf", tmp_path / "alone.gguf"
    (tmp_path / ".m.gguf.part").write_bytes(bytes(1 << 20))
    write_gguf(path, FIELDS, TENSORS)
    write_gguf(alone, FIELDS, TENSORS)
    assert path.read_bytes() == alone.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["alone.gguf", "m.gguf"]


@pytest.mark.skipif(os.name == "nt", reason="its open files exclude each other")
def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with whole_file.whole_or_nothing(path) as out:
        out.write(b"first")
        with pytest.raises(InUse, match=r"m\.gguf is being written by another process"):
            write_gguf(path, FIELDS, TENSORS)
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_a_link_in_place_of_the_part_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    (tmp_path / ".m.gguf.part").symlink_to(other)
    with pytest.raises(OSError, match=r"m\.gguf\.part"):
        write_gguf(tmp_path / "m.gguf", FIELDS, TENSORS)
    assert other.read_bytes() == b"precious"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "m.gguf"
    link.symlink_to(tmp_path / "disk" / "m.gguf")
    write_gguf(link, {}, TENSORS)
    assert link.is_symlink()
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["m.gguf"]


def test_a_float_keeps_infinity_and_nan() -> None:
    assert Field.float32(math.inf).payload == struct.pack("<f", math.inf)
    assert Field.float32(math.nan).payload == struct.pack("<f", math.nan)


def test_a_full_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match="MiB free, the model needs"):
        write_gguf(tmp_path / "m.gguf", {}, TENSORS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Field.uint32(-1),
        lambda: Field.uint32(2**32),
        lambda: Field.number(1.5, gguf_bytes.I32),
        lambda: Field.numbers([1, 300], gguf_bytes.U8),
        lambda: Field.float32(1e39),
        lambda: Field.numbers(np.array([0.0, 1e39]), gguf_bytes.F32),
        lambda: Field.string("\ud800"),
        lambda: Field.of([]),
        lambda: Field.of([1, "a"]),
        lambda: Field.of(None),
    ],
)
def test_values_that_do_not_fit_are_refused(make: Callable[[], Field]) -> None:
    with pytest.raises(FileFormatError):
        make()


def test_customary_types() -> None:
    assert Field.of(True) == Field(gguf_bytes.BOOL, b"\x01")
    assert Field.of(7) == Field(gguf_bytes.U32, struct.pack("<I", 7))
    assert Field.of(0.5) == Field(gguf_bytes.F32, struct.pack("<f", 0.5))
    assert Field.of([7]) == Field.numbers([7], gguf_bytes.I32)
    assert Field.of(["a"]) == Field.strings(["a"])
