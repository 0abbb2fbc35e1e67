"""Parses one GGUF file (the whole model, or one shard of it) into metadata and tensor views.

Owns: the header, the tensor table, alignment, and every check that needs one file only.
Must not know: shard sets, or which keys and tensors a model needs.
Called by `gguf_shards.py`. The file is hostile until checked: see `Cursor` for the rule.

    | "GGUF" | u32 version | u64 tensor count | u64 key count |
    | key count x (name, u32 value type, value)               |
    | tensor count x (name, u32 n_dims, n_dims x u64 dims, u32 type, u64 offset) |
    | padding | data: each tensor at its offset, padded to the alignment |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .errors import FileFormatError, MartletError, UnsupportedError
from .file_map import FileMap
from .formats import FORMATS, FORMATS_BY_ID, Format
from .gguf_cursor import UINT32, Cursor, quoted
from .gguf_field import Field

_T = TypeVar("_T")
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536  # the largest page size in use; more would only be padding
VERSIONS = (2, 3)  # alike but for the byte order that 3 allows
ALIGNMENT_KEY = "general.alignment"

_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # name length, name, value type, value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # name length, name, n_dims, type, offset
_BIG_ENDIAN_VERSIONS = tuple(int.from_bytes(v.to_bytes(4, "big"), "little") for v in (1, 2, 3))
# Only for messages: what a file may hold beyond FORMATS.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class GGUFTensor:
    """A stored tensor; `data` is a read-only view of the mapped file."""

    name: str
    format: Format
    shape: tuple[int, ...]  # NumPy order: (rows, cols)
    data: np.ndarray = field(repr=False)  # uint8 (n_bytes,)

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return int(self.data.size)


@dataclass(frozen=True, eq=False)
class GGUFPart:
    """What one file holds. Dropping the last reference to a part and its views unmaps it."""

    path: Path
    n_bytes: int
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


@dataclass(frozen=True)
class _Entry:
    """A row of the tensor table: what the file claims, before its place is checked."""

    name: str
    format: Format
    shape: tuple[int, ...]
    n_bytes: int
    offset: int


def read_part(path: Path) -> GGUFPart:
    return _read(path, _parse)


def read_stored_fields(path: Path) -> dict[str, Field]:
    """The metadata as the file stores it, for a file that copies it."""
    return _read(path, _parse_fields)


def _read(path: Path, parse: Callable[[Path, FileMap], _T]) -> _T:
    try:
        mapped = FileMap.open(path)
        try:
            return parse(path, mapped)
        except MartletError:
            mapped.close()  # no view exists yet; the error's traceback would keep the map alive
            raise
    except MartletError as error:
        raise type(error)(f"{path}: {error}") from None
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parse(path: Path, mapped: FileMap) -> GGUFPart:
    cursor = Cursor(mapped)
    version = _read_version(cursor)
    n_tensors = cursor.count(_LEAST_TENSOR_BYTES, "tensor")
    n_keys = cursor.count(_LEAST_KEY_BYTES, "metadata key")
    metadata = _read_metadata(cursor, n_keys)
    entries = _read_entries(cursor, n_tensors)
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    data_start = padded(cursor.position, alignment)
    _check_places(entries, data_start, alignment, len(mapped))
    tensors = {}
    for e in entries:
        data = np.frombuffer(mapped, np.uint8, e.n_bytes, data_start + e.offset)
        tensors[e.name] = GGUFTensor(e.name, e.format, e.shape, data)
    return GGUFPart(path, len(mapped), version, alignment, metadata, tensors)


def _parse_fields(path: Path, mapped: FileMap) -> dict[str, Field]:
    cursor = Cursor(mapped)
    _read_version(cursor)
    cursor.count(_LEAST_TENSOR_BYTES, "tensor")
    n_keys = cursor.count(_LEAST_KEY_BYTES, "metadata key")
    return {
        key: Field(type_id, mapped[start : cursor.position])
        for key, type_id, start, _ in _read_pairs(cursor, n_keys)
    }


def _read_version(cursor: Cursor) -> int:
    magic = cursor.raw(4, "magic number")
    if magic != b"GGUF":
        raise FileFormatError(f"starts with {magic!r}, not b'GGUF'; this is not a GGUF file")
    version = cursor.u32("version")
    if version in _BIG_ENDIAN_VERSIONS:
        raise UnsupportedError("is a big-endian GGUF file; martlet reads little-endian files only")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"is GGUF version {version}; martlet reads versions {VERSIONS[0]} and {VERSIONS[-1]}, "
            "convert the model again with a current tool"
        )
    return version


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, Any]:
    metadata = {key: value for key, _, _, value in _read_pairs(cursor, n_keys)}
    check_alignment(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    return metadata


def _read_pairs(cursor: Cursor, n_keys: int) -> Iterator[tuple[str, int, int, Any]]:
    """(key, value type, where the value starts, value); the cursor then stands at its end."""
    seen: set[str] = set()
    for i in range(n_keys):
        key = cursor.name(f"name of metadata key {i}")
        what = f"metadata key {quoted(key)}"
        if key in seen:
            raise FileFormatError(f"{what} appears twice")
        seen.add(key)
        type_id = cursor.u32(f"value type of {what}")
        if key == ALIGNMENT_KEY and type_id != UINT32:
            raise FileFormatError(f"{what} has value type {type_id}, must be {UINT32} (uint32)")
        start = cursor.position
        yield key, type_id, start, cursor.value(type_id, what)


def check_alignment(alignment: int) -> None:
    if alignment.bit_count() != 1 or alignment > MAX_ALIGNMENT:
        raise FileFormatError(
            f"metadata key {ALIGNMENT_KEY!r} is {alignment}, "
            f"must be a power of two up to {MAX_ALIGNMENT}"
        )


def _read_entries(cursor: Cursor, n_tensors: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for i in range(n_tensors):
        name = cursor.name(f"name of tensor {i}")
        if name in entries:
            raise FileFormatError(f"tensor {quoted(name)} appears twice")
        entries[name] = _read_entry(cursor, name)
    return list(entries.values())


def _read_entry(cursor: Cursor, name: str) -> _Entry:
    what = f"tensor {quoted(name)}"
    n_dims = cursor.u32(f"dimension count of {what}")
    if n_dims > MAX_DIMS:
        raise FileFormatError(f"{what} has {n_dims} dimensions, the limit is {MAX_DIMS}")
    dims = [cursor.u64(f"dimension {i} of {what}") for i in range(n_dims)]
    if 0 in dims:
        raise FileFormatError(f"{what} has dimensions {dims}, none may be 0")
    type_id = cursor.u32(f"type of {what}")
    if type_id not in FORMATS_BY_ID:
        label = _OTHER_TYPES.get(type_id, "unknown")
        raise UnsupportedError(
            f"{what} has type {type_id} ({label}), martlet reads {', '.join(FORMATS)}"
        )
    offset = cursor.u64(f"offset of {what}")
    fmt = FORMATS_BY_ID[type_id]
    shape = tuple(reversed(dims))
    try:
        return _Entry(name, fmt, shape, fmt.data_bytes(shape), offset)
    except FileFormatError as error:
        raise FileFormatError(f"{what}: {error}") from None


def _check_places(entries: list[_Entry], data_start: int, alignment: int, n_bytes: int) -> None:
    """Every tensor lies in the file, aligned, and shares no byte with another."""
    free_from = 0
    for entry in sorted(entries, key=lambda e: e.offset):
        what = f"tensor {quoted(entry.name)}"
        if entry.offset % alignment:
            raise FileFormatError(f"{what} has offset {entry.offset}, no multiple of {alignment}")
        if entry.offset < free_from:
            raise FileFormatError(
                f"{what} has offset {entry.offset}, but the tensor before it reaches {free_from}"
            )
        free_from = entry.offset + entry.n_bytes
        # Padding counts too: writers pad the last tensor as well, so a file that ends inside its
        # padding was cut.
        end = data_start + padded(free_from, alignment)
        if end > n_bytes:
            raise FileFormatError(
                f"{what} needs {entry.n_bytes} bytes at byte {data_start + entry.offset} and "
                f"reaches {end} with padding, but the file has {n_bytes}; "
                "it is damaged or was cut short, download or convert it again"
            )


def padded(position: int, alignment: int) -> int:
    return (position + alignment - 1) // alignment * alignment
