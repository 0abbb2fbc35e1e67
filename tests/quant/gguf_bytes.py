"""Builds GGUF files byte by byte, valid or hostile. Knows the format, nothing of the reader.

Every builder takes what a hostile file would claim (`count=`, `length=`), apart from what it holds.
"""

import struct
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
TYPE_F32, TYPE_Q4_0, TYPE_Q8_0 = 0, 2, 8


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, type_id: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + payload


def u32_pair(key: str, number: int) -> bytes:
    return pair(key, U32, struct.pack("<I", number))


def array(type_id: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    count = len(items) if count is None else count
    return struct.pack("<IQ", type_id, count) + b"".join(items)


def tensor(
    name: str | bytes,
    dims: Sequence[int],
    type_id: int = TYPE_F32,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """A row of the tensor table; `dims` in file order (row length first)."""
    head = string(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, type_id, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    header += b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def tiny() -> bytes:
    """A valid file that uses every value type, and two tensors of 2x32: Q8_0, then F32."""
    pairs = [
        pair("general.architecture", STRING, string("llama")),
        pair("u8", U8, b"\xff"),
        pair("i8", I8, b"\xff"),
        pair("u16", U16, struct.pack("<H", 65_535)),
        pair("i16", I16, struct.pack("<h", -2)),
        u32_pair("u32", 2**32 - 1),
        pair("i32", I32, struct.pack("<i", -3)),
        pair("f32", F32, struct.pack("<f", 0.5)),
        pair("yes", BOOL, b"\x01"),
        pair("u64", U64, struct.pack("<Q", 2**64 - 1)),
        pair("i64", I64, struct.pack("<q", -4)),
        pair("f64", F64, struct.pack("<d", 0.1)),
        pair("tokens", ARRAY, array(STRING, [string("a"), string(""), string(b"\xe2\x96")])),
        pair("scores", ARRAY, array(F32, [struct.pack("<2f", -1.0, 2.0)], count=2)),
        pair("flags", ARRAY, array(BOOL, [b"\x01", b"\x00"])),
        pair("nested", ARRAY, array(ARRAY, [array(U8, [b"\x07"]), array(U8, [])])),
    ]
    tensors = [
        tensor("q8", [32, 2], TYPE_Q8_0, offset=0),
        tensor("f32", [32, 2], TYPE_F32, offset=96),
    ]
    q8 = (b"\x00\x3c" + bytes(range(32))) * 2  # scale 1.0, weights 0..31
    return gguf(pairs, tensors, q8 + bytes(96 - 68) + struct.pack("<64f", *range(64)))


@contextmanager
def bounded(seconds: float = 1.0, n_bytes: int = 50 << 20) -> Iterator[None]:
    """Fails when the body takes longer, or allocates more at its peak: the limits for bad files."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        yield
    finally:
        elapsed, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert elapsed < seconds
    assert peak < n_bytes
