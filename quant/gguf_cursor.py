"""Reads the numbers, strings and arrays of a GGUF header without ever leaving the file.

Owns: the value types of GGUF and the rule "compare with the bytes left first, allocate later".
Must not know: what a key means, tensors, where the file came from.
Called by `gguf_part.py`. Every count and length is a Python int, so no product can wrap.
"""

import mmap
import struct
from typing import Any

import numpy as np

from .errors import FileFormatError, UnsupportedError

# Caps beyond "must fit into the file". Real chat templates and embedded tokenizer files stay far
# below the string cap; no writer nests arrays at all; keys are capped by the GGUF specification.
MAX_STRING_BYTES = 64 << 20
MAX_NAME_BYTES = 65_535
MAX_ARRAY_DEPTH = 2

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", UINT32: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
NUMBER_DTYPES = {type_id: np.dtype(code) for type_id, code in _NUMBERS.items()}

# The least an element can take: its size, or for strings and arrays their empty form.
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LEAST_BYTES = {type_id: dtype.itemsize for type_id, dtype in NUMBER_DTYPES.items()}
_LEAST_BYTES |= {STRING: _U64.size, ARRAY: _U32.size + _U64.size}


def quoted(text: str) -> str:
    """`text` for an error message: one line, and short even when the file holds a novel."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class Cursor:
    """A position in a buffer that only moves forward and never past its end.

    `what` in every method names the field for the error message.
    """

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        self._buffer = buffer
        self._n_bytes = len(buffer)
        self.position = 0

    def need(self, n_bytes: int, what: str) -> None:
        left = self._n_bytes - self.position
        if n_bytes > left:
            raise FileFormatError(
                f"{what} needs {n_bytes} bytes at byte {self.position}, but the file of "
                f"{self._n_bytes} bytes has {left} left; it is damaged or was cut short"
            )

    def raw(self, n_bytes: int, what: str) -> bytes:
        self.need(n_bytes, what)
        start, self.position = self.position, self.position + n_bytes
        return self._buffer[start : self.position]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.raw(_U32.size, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.raw(_U64.size, what))[0])

    def count(self, least_bytes: int, what: str) -> int:
        """A u64 that counts things of at least `least_bytes`, which must still fit."""
        count = self.u64(f"{what} count")
        self.need(count * least_bytes, f"{what} count {count}")
        return count

    def _string_bytes(self, cap: int, what: str) -> bytes:
        n_bytes = self.u64(f"length of {what}")
        self.need(n_bytes, f"{what} of length {n_bytes}")
        if n_bytes > cap:
            raise FileFormatError(f"{what} has {n_bytes} bytes, the limit is {cap}")
        return self.raw(n_bytes, what)

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, valid UTF-8."""
        raw = self._string_bytes(MAX_NAME_BYTES, what)
        if not raw:
            raise FileFormatError(f"{what} is empty")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{what} {raw[:80]!r} is not UTF-8: {error.reason}") from None

    def value(self, type_id: int, what: str) -> Any:
        """One metadata value. Bad UTF-8 in a single string becomes U+FFFD, for it is shown."""
        if type_id == STRING:
            return self._string_bytes(MAX_STRING_BYTES, what).decode("utf-8", "replace")
        if type_id == ARRAY:
            return self._array(what, depth=1)
        if type_id not in NUMBER_DTYPES:
            raise FileFormatError(f"{what} has value type {type_id}; GGUF defines 0 to 12")
        number = self._numbers(type_id, 1, what)[0]
        return number if isinstance(number, bool) else number.item()

    def _array(self, what: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise UnsupportedError(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        type_id = self.u32(f"element type of {what}")
        if type_id not in _LEAST_BYTES:
            raise FileFormatError(f"{what} has element type {type_id}; GGUF defines 0 to 12")
        count = self.count(_LEAST_BYTES[type_id], f"{what} element")
        if type_id == STRING:
            return self._strings(count, what)
        if type_id == ARRAY:
            return [self._array(f"{what}[{i}]", depth + 1) for i in range(count)]
        return self._numbers(type_id, count, what)

    def _numbers(self, type_id: int, count: int, what: str) -> Any:
        """A NumPy array of its own memory; for bools a list."""
        dtype = NUMBER_DTYPES[type_id]
        numbers = np.frombuffer(self.raw(count * dtype.itemsize, what), dtype)
        if type_id != BOOL:
            return numbers.copy()  # frombuffer over bytes is read-only
        if count and numbers.max() > 1:
            raise FileFormatError(f"{what} holds the bool {numbers.max()}; only 0 and 1 are valid")
        return numbers.astype(np.bool_).tolist()

    def _strings(self, count: int, what: str) -> list[str]:
        """Tokens may be raw bytes: what is not UTF-8 survives as lone surrogates.

        `text.encode("utf-8", "surrogateescape")` gives the bytes back. The loop is written out
        because a vocabulary has 262,144 strings and a method call for each would cost the most.
        """
        buffer, position, end = self._buffer, self.position, self._n_bytes
        length_at = _U64.unpack_from
        strings: list[str] = []
        for i in range(count):
            start = position + 8
            stop = start + length_at(buffer, position)[0] if start <= end else start
            if stop > end or stop - start > MAX_STRING_BYTES:
                self.position = position
                self._string_bytes(MAX_STRING_BYTES, f"{what}[{i}]")  # raises, with the numbers
            strings.append(buffer[start:stop].decode("utf-8", "surrogateescape"))
            position = stop
        self.position = position
        return strings
