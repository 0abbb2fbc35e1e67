"""Metadata values of a GGUF file as they are stored: a type and the bytes of the value.

Owns: encoding of numbers, strings and arrays. Must not know: what a key means, files.
Keeping the stored form means that a value copied from one file to another stays what it was, also
where Python would lose it: the width of an integer, the type of an empty array, a token that is
not UTF-8. The counterpart that decodes is `gguf_cursor.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import FileFormatError
from .gguf_cursor import ARRAY, BOOL, NUMBER_DTYPES, STRING, UINT32

INT32, FLOAT32 = 5, 6
_TYPES_OF_DTYPES = {dtype: type_id for type_id, dtype in NUMBER_DTYPES.items() if type_id != BOOL}


@dataclass(frozen=True)
class Field:
    """A metadata value: a GGUF type id and the little-endian bytes of the value."""

    type_id: int
    payload: bytes

    @classmethod
    def number(cls, value: int | float, type_id: int) -> Field:
        """Any number type by its id; a value that does not fit is refused."""
        return cls(type_id, _numbers([value], type_id))

    @classmethod
    def uint32(cls, value: int) -> Field:
        return cls.number(value, UINT32)

    @classmethod
    def float32(cls, value: float) -> Field:
        return cls.number(value, FLOAT32)

    @classmethod
    def boolean(cls, value: bool) -> Field:
        return cls(BOOL, bytes([bool(value)]))

    @classmethod
    def string(cls, value: str) -> Field:
        """Lone surrogates stand for bytes that are not UTF-8, as the reader gives them."""
        return cls(STRING, _string(value))

    @classmethod
    def strings(cls, values: Iterable[str]) -> Field:
        items = [_string(value) for value in values]
        return cls(ARRAY, _array_head(STRING, len(items)) + b"".join(items))

    @classmethod
    def booleans(cls, values: Iterable[bool]) -> Field:
        items = bytes(bool(value) for value in values)
        return cls(ARRAY, _array_head(BOOL, len(items)) + items)

    @classmethod
    def numbers(cls, values: Iterable[int | float] | np.ndarray, type_id: int) -> Field:
        items = values if isinstance(values, np.ndarray) else list(values)
        return cls(ARRAY, _array_head(type_id, len(items)) + _numbers(items, type_id))

    @classmethod
    def of(cls, value: Any) -> Field:
        """The customary type of a Python value: int is uint32, float float32, list[int] int32.

        NumPy arrays keep their type. An empty list says nothing of its type and is refused.
        """
        if isinstance(value, np.ndarray):
            return cls.numbers(value, _TYPES_OF_DTYPES[value.dtype.newbyteorder("<")])
        if isinstance(value, (list, tuple)):
            if not value:
                raise FileFormatError("an empty list has no type; name it, as Field.strings([])")
            for kind, make in _ARRAYS.items():
                if all(type(item) is kind for item in value):
                    return make(value)
        elif type(value) in _SCALARS:
            return _SCALARS[type(value)](value)
        raise FileFormatError(f"GGUF metadata has no form for {value!r:.80}")


_SCALARS: dict[type, Any] = {
    bool: Field.boolean,
    int: Field.uint32,
    float: Field.float32,
    str: Field.string,
}
_ARRAYS: dict[type, Any] = {
    bool: Field.booleans,
    int: lambda values: Field.numbers(values, INT32),
    float: lambda values: Field.numbers(values, FLOAT32),
    str: Field.strings,
}


def _string(value: str) -> bytes:
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FileFormatError(
            f"the text {value!r:.80} holds half of a character at {error.start}; UTF-8 has no form"
            " for it"
        ) from None
    return struct.pack("<Q", len(raw)) + raw


def _array_head(type_id: int, count: int) -> bytes:
    return struct.pack("<IQ", type_id, count)


def _numbers(values: Any, type_id: int) -> bytes:
    dtype = NUMBER_DTYPES[type_id]
    try:
        given = np.asarray(values)
        with np.errstate(over="ignore"):
            stored = given.astype(dtype)
        # Casting wraps integers silently, and makes large floats infinite. Rounding is no misfit.
        is_float = dtype.kind == "f"
        fits = not _grows(given, stored) if is_float else np.array_equal(stored, given)
    except (OverflowError, ValueError, TypeError) as error:
        raise FileFormatError(f"{values!r:.80} does not fit GGUF's {dtype.name}: {error}") from None
    if not fits:
        raise FileFormatError(f"{values!r:.80} does not fit GGUF's {dtype.name}")
    return stored.tobytes()


def _grows(given: np.ndarray, stored: np.ndarray) -> bool:
    """Whether a finite number has become infinite."""
    return bool((np.isinf(stored) & np.isfinite(given.astype(np.float64))).any())
