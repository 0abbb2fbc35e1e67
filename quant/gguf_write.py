"""Writes a GGUF file: metadata as given, tensors one at a time in the order given.

Owns: header, tensor table, alignment, and the checks before the first byte. Must not know: what
keys and tensors mean, or where their data comes from.
Tensor data is asked for while writing, so memory holds about one tensor. The same input gives the
same bytes. The layout is drawn in `gguf_part.py`, which reads it. The `gguf` package's writer is
not used: it has no empty arrays and decides integer widths anew, so files could not be copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from .errors import FileFormatError
from .formats import Format
from .gguf_cursor import MAX_NAME_BYTES, quoted
from .gguf_field import Field
from .gguf_part import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_DIMS, check_alignment, padded
from .whole_file import check_space, whole_or_nothing

VERSION = 3


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written.

    `shape` is in NumPy order, the row length last. `data` is called once, while writing, and
    returns an array of exactly `n_bytes` bytes, of any dtype.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    data: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        return self.format.data_bytes(self.shape)


def write_gguf(
    path: str | PathLike[str],
    fields: Mapping[str, Field],
    tensors: Sequence[OutTensor],
    *,
    on_tensor: Callable[[OutTensor], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Returns the bytes written; `on_tensor` is called after each tensor.

    The file appears under its name when it is whole, and not at all on any failure; `check` may
    read it before, and refuses it by raising. Raises FileFormatError for names, shapes or data
    that no reader would accept, NoSpace for a full disk, InUse.
    """
    path = Path(path)
    alignment = _alignment(fields)
    head = _head(fields, tensors, alignment)
    n_bytes = file_bytes(fields, tensors)
    check_space(path.resolve().parent, n_bytes, "the model", "write it to another disk")
    with whole_or_nothing(path, check) as out:
        out.write(head)
        for tensor in tensors:
            out.write(_checked_data(tensor).data)
            out.write(bytes(-tensor.n_bytes % alignment))
            if on_tensor is not None:
                on_tensor(tensor)
    return n_bytes


def file_bytes(fields: Mapping[str, Field], tensors: Sequence[OutTensor]) -> int:
    """What `write_gguf` would write, without asking for data."""
    alignment = _alignment(fields)
    data_bytes = sum(padded(tensor.n_bytes, alignment) for tensor in tensors)
    return len(_head(fields, tensors, alignment)) + data_bytes


def _alignment(fields: Mapping[str, Field]) -> int:
    field = fields.get(ALIGNMENT_KEY)
    if field is None:
        return DEFAULT_ALIGNMENT
    if field.type_id != Field.uint32(0).type_id:
        raise FileFormatError(f"metadata key {ALIGNMENT_KEY!r} must be a uint32")
    alignment = int.from_bytes(field.payload, "little")
    check_alignment(alignment)
    return alignment


def _head(fields: Mapping[str, Field], tensors: Sequence[OutTensor], alignment: int) -> bytes:
    _check_tensors(tensors)
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(fields))]
    for key, field in fields.items():
        parts += [_name(key), struct.pack("<I", field.type_id), field.payload]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        numbers = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        parts += [_name(tensor.name), numbers, struct.pack("<IQ", tensor.format.ggml_type, offset)]
        offset += padded(tensor.n_bytes, alignment)
    head = b"".join(parts)
    return head + bytes(-len(head) % alignment)


def _check_tensors(tensors: Sequence[OutTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        what = f"tensor {quoted(tensor.name)}"
        if tensor.name in seen:
            raise FileFormatError(f"{what} appears twice")
        seen.add(tensor.name)
        if not 1 <= len(tensor.shape) <= MAX_DIMS or min(tensor.shape) < 1:
            raise FileFormatError(
                f"{what} has shape {tensor.shape}; GGUF holds 1 to {MAX_DIMS} dimensions of 1 or"
                " more"
            )
        try:
            tensor.format.data_bytes(tensor.shape)
        except FileFormatError as error:
            raise FileFormatError(f"{what}: {error}") from None


def _name(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError:
        raise FileFormatError(f"name {quoted(text)} is not UTF-8") from None
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise FileFormatError(
            f"name {quoted(text)} has {len(raw)} bytes; GGUF names have 1 to {MAX_NAME_BYTES}"
        )
    return struct.pack("<Q", len(raw)) + raw


def _checked_data(tensor: OutTensor) -> np.ndarray:
    data = np.ascontiguousarray(tensor.data())
    if data.nbytes != tensor.n_bytes:
        raise FileFormatError(
            f"tensor {quoted(tensor.name)}: {tensor.format.name} data of shape {tensor.shape} has"
            f" {tensor.n_bytes} bytes, got {data.nbytes}"
        )
    return data.reshape(-1).view(np.uint8)
