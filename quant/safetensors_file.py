"""Maps one safetensors file: its tensor table, checked, and its weights as float32 rows on demand.

Owns: the header and the three float types. Must not know: shards, architectures, GGUF. The file is
hostile until checked. The `safetensors` library reads whole tensors and has no BF16 for NumPy;
here a row at a time is enough, so that a tensor larger than memory allows can be converted.

    | u64 header length | JSON: name -> dtype, shape, [begin, end) of the data | data |
"""

import json
import math
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from .errors import FileFormatError, MartletError, UnsupportedError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_DIMS = 8
MAX_COUNT = 1 << 63  # bytes and lengths of any file are below; Python's numbers know no end
METADATA = "__metadata__"
# What the weights are read as; BF16 is the upper half of a float32.
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Other types of the format, by bytes: a file may hold them, but not as weights to convert.
_OTHER_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A tensor where it lies in the file. One dimension counts as rows of one value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    data: np.ndarray = field(repr=False)  # uint8 (n_bytes,), a view of the mapped file

    @property
    def n_rows(self) -> int:
        """Of a vector its values, of a stack of matrices the rows of all."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    def check_convertible(self) -> None:
        if self.dtype not in _NUMPY_TYPES:
            raise UnsupportedError(
                f"tensor {self.name!r} of {self.path.name} has type {self.dtype}; only "
                f"{', '.join(_NUMPY_TYPES)} are converted: fetch the model as it was trained"
            )
        if len(self.matrix_shape) not in (1, 2, 3):
            raise UnsupportedError(
                f"tensor {self.name!r} has {len(self.shape)} dimensions, expected 1 to 3"
            )

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(channels, taps) of a kernel over channels, which is stored as (channels, 1, taps)."""
        is_kernel = len(self.shape) == 3 and self.shape[1] == 1 < self.shape[2]
        return (self.shape[0], self.shape[2]) if is_kernel else self.shape

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """The rows as a new float32 array (n, cols)."""
        stored = self.data.view(_NUMPY_TYPES[self.dtype])
        picked = stored.reshape(self.n_rows, -1)[index]
        if self.dtype == "BF16":
            return (picked.astype(np.uint32) << 16).view(np.float32)
        return picked.astype(np.float32)


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    path: Path
    tensors: dict[str, SourceTensor]
    _map: mmap.mmap = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        try:
            mapped = _map(path)
            entries, data_start = _read_header(mapped)
            tensors = _place(path, mapped, entries, data_start)
        except MartletError as error:
            raise type(error)(f"{path}: {error}") from None
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from None
        return cls(path, tensors, mapped)

    def drop_pages(self) -> None:
        """Gives back the memory of what was read so far."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap:
    # A pipe or device has no size to check against, and opening one may block.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileFormatError("is not a regular file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < 8:
            raise FileFormatError("has less than 8 bytes; this is not a safetensors file")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(mapped: mmap.mmap) -> tuple[dict[str, Any], int]:
    n_bytes = int.from_bytes(mapped[:8], "little")
    limit = min(MAX_HEADER_BYTES, len(mapped) - 8)
    if n_bytes > limit:
        raise FileFormatError(
            f"claims a header of {n_bytes} bytes where at most {limit} can be; "
            "the file is cut short or not in safetensors format: fetch it again"
        )
    header = parse_json(mapped[8 : 8 + n_bytes], "the header")
    if not isinstance(header, dict):
        raise FileFormatError("the header is not a JSON object")
    header.pop(METADATA, None)
    return header, 8 + n_bytes


def parse_json(raw: bytes, what: str) -> Any:
    """JSON from a stranger: every failure is a FileFormatError, a key that comes twice too."""

    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise FileFormatError(f"{what}: key {key!r} appears twice")
            found[key] = value
        return found

    try:
        return json.loads(raw, object_pairs_hook=without_twins)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FileFormatError(f"{what} is not JSON: {reason}") from None


def _place(
    path: Path, mapped: mmap.mmap, entries: dict[str, Any], data_start: int
) -> dict[str, SourceTensor]:
    """Every tensor lies in the file and shares no byte with another, and nothing is left over."""
    checked = [(name, *_check_entry(name, entry)) for name, entry in entries.items()]
    data_bytes = len(mapped) - data_start
    tensors, at = {}, 0
    for name, dtype, shape, begin, end in sorted(checked, key=lambda row: row[3:]):
        if begin != at:
            raise FileFormatError(f"tensor {name!r} begins at {begin}, the one before ends at {at}")
        if end > data_bytes:
            raise FileFormatError(
                f"tensor {name!r} ends at byte {end} of {data_bytes}; the file is cut short: "
                "fetch it again"
            )
        data = np.frombuffer(mapped, np.uint8, end - begin, data_start + begin)
        tensors[name] = SourceTensor(name, dtype, shape, path, data)
        at = end
    if at != data_bytes:
        raise FileFormatError(f"has {data_bytes} bytes of data, its tensors take {at}")
    return tensors


def _check_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end), with a size that fits the shape."""
    if not isinstance(entry, dict):
        raise FileFormatError(f"tensor {name!r} is described by no JSON object")
    dtype, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    size = _OTHER_BYTES.get(dtype) if isinstance(dtype, str) else None
    if isinstance(dtype, str) and dtype in _NUMPY_TYPES:
        size = np.dtype(_NUMPY_TYPES[dtype]).itemsize
    if size is None:
        raise UnsupportedError(f"tensor {name!r} has the unknown type {dtype!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise FileFormatError(
            f"tensor {name!r} has shape {shape!r:.80}, expected at most {MAX_DIMS} whole numbers"
        )
    if not _are_counts(place) or len(place) != 2 or place[0] > place[1]:
        raise FileFormatError(
            f"tensor {name!r} has data_offsets {place!r:.80}, expected [begin, end]"
        )
    needed = math.prod(shape) * size
    if place[1] - place[0] != needed:
        raise FileFormatError(
            f"tensor {name!r} of type {dtype} and shape {shape} needs {needed} bytes, "
            f"its place has {place[1] - place[0]}"
        )
    return str(dtype), tuple(shape), place[0], place[1]


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < MAX_COUNT for v in values
    )
