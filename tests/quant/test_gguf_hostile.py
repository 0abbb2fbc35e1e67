"""Files from strangers: each is refused with one typed error that names what is wrong.

The cases follow public bug reports (overflowing sizes, endless counts, cut files, duplicates).
"""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from martlet.quant.errors import FileFormatError, MartletError, UnsupportedError
from martlet.quant.gguf_cursor import MAX_NAME_BYTES, MAX_STRING_BYTES
from martlet.quant.gguf_file import GGUFFile

from . import gguf_bytes as gb

ARCH = gb.pair("general.architecture", gb.STRING, gb.string("llama"))
ALL_ONES = 2**64 - 1


def array_of(type_id: int, count: int, *items: bytes) -> list[bytes]:
    return [gb.pair("numbers", gb.ARRAY, gb.array(type_id, items, count=count))]


def alignment(number: int) -> bytes:
    return gb.gguf([gb.u32_pair("general.alignment", number)])


def two_tensors(second: bytes) -> bytes:
    return gb.gguf([ARCH], [gb.tensor("a", [16]), second], bytes(128))


HOSTILE = {
    # name: (file, error, what the message must say)
    "empty file": (b"", FileFormatError, "is empty"),
    "other magic": (gb.gguf(magic=b"GGML"), FileFormatError, "starts with b'GGML'"),
    "version 0": (gb.gguf(version=0), UnsupportedError, "GGUF version 0"),
    "version 1": (gb.gguf(version=1), UnsupportedError, "GGUF version 1;"),
    "version 4": (gb.gguf(version=4), UnsupportedError, "GGUF version 4"),
    "big endian": (gb.gguf(version=3 << 24), UnsupportedError, "big-endian"),
    # counts and lengths against the bytes left
    "tensor count": (gb.gguf(n_tensors=2**62), FileFormatError, f"tensor count {2**62} needs"),
    "key count": (gb.gguf(n_pairs=ALL_ONES), FileFormatError, f"metadata key count {ALL_ONES}"),
    "key length": (
        gb.gguf([gb.string("", length=ALL_ONES) + bytes(64)]),
        FileFormatError,
        f"name of metadata key 0 of length {ALL_ONES} needs",
    ),
    "string length": (
        gb.gguf([gb.pair("general.name", gb.STRING, gb.string("", length=ALL_ONES))]),
        FileFormatError,
        f"metadata key 'general.name' of length {ALL_ONES} needs",
    ),
    "tensor name length": (
        gb.gguf([ARCH], [gb.string("", length=ALL_ONES) + bytes(64)]),
        FileFormatError,
        f"name of tensor 0 of length {ALL_ONES} needs",
    ),
    "array string length": (
        gb.gguf(array_of(gb.STRING, 2, gb.string("a"), gb.string("b", length=2**63))),
        FileFormatError,
        rf"'numbers'\[1\] of length {2**63} needs",
    ),
    "array string one byte past the end": (
        gb.gguf(array_of(gb.STRING, 1, gb.string("ab", length=3)), alignment=1),
        FileFormatError,
        r"'numbers'\[0\] of length 3 needs 3 bytes at byte \d+, but the file of \d+ bytes has 2",
    ),
    "array of u8": (
        gb.gguf(array_of(gb.U8, 2**63)), FileFormatError, f"'numbers' element count {2**63} needs",
    ),
    "array of f64 whose bytes wrap": (
        gb.gguf(array_of(gb.F64, 2**61)), FileFormatError, f"count {2**61} needs {2**64} bytes",
    ),
    "array of strings": (
        gb.gguf(array_of(gb.STRING, 2**40)), FileFormatError, f"element count {2**40} needs",
    ),
    "array of arrays": (
        gb.gguf(array_of(gb.ARRAY, 1, gb.array(gb.U8, [], count=2**62))),
        FileFormatError,
        rf"'numbers'\[0\] element count {2**62} needs",
    ),
    "deep array": (
        gb.gguf(array_of(gb.ARRAY, 1, struct.pack("<IQ", gb.ARRAY, 1) * 1000)),
        UnsupportedError,
        "nests arrays deeper than 2",
    ),
    "long key": (
        gb.gguf([gb.pair("k" * (MAX_NAME_BYTES + 1), gb.U8, b"\0")]),
        FileFormatError,
        f"name of metadata key 0 has {MAX_NAME_BYTES + 1} bytes, the limit is {MAX_NAME_BYTES}",
    ),
    # values
    "value type": (
        gb.gguf([gb.pair("odd", 13, bytes(8))]), FileFormatError, "'odd' has value type 13",
    ),
    "element type": (
        gb.gguf(array_of(13, 1, bytes(8))), FileFormatError, "'numbers' has element type 13",
    ),
    "bool": (gb.gguf([gb.pair("yes", gb.BOOL, b"\2")]), FileFormatError, "'yes' holds the bool 2"),
    "bool in array": (gb.gguf(array_of(gb.BOOL, 2, b"\1\7")), FileFormatError, "the bool 7"),
    # names
    "empty key": (
        gb.gguf([gb.pair("", gb.U8, b"\0")]), FileFormatError, "metadata key 0 is empty",
    ),
    "key not UTF-8": (
        gb.gguf([gb.pair(b"\xff\xfe", gb.U8, b"\0")]), FileFormatError, "key 0 .* is not UTF-8",
    ),
    "duplicate key": (gb.gguf([ARCH, ARCH]), FileFormatError, "'general.architecture' appears tw"),
    "empty tensor name": (two_tensors(gb.tensor("", [16])), FileFormatError, "tensor 1 is empty"),
    "tensor name not UTF-8": (two_tensors(gb.tensor(b"\x80", [16])), FileFormatError, "not UTF-8"),
    "duplicate tensor": (
        two_tensors(gb.tensor("a", [16], offset=64)), FileFormatError, "tensor 'a' appears twice",
    ),
    # alignment
    "alignment 0": (alignment(0), FileFormatError, "'general.alignment' is 0"),
    "alignment 3": (alignment(3), FileFormatError, "is 3, must be a power of two"),
    "alignment 2^17": (alignment(2**17), FileFormatError, "is 131072, .* up to 65536"),
    "alignment 2^30": (alignment(2**30), FileFormatError, f"is {2**30}, .* up to 65536"),
    "alignment 2^31": (alignment(2**31), FileFormatError, f"is {2**31}"),
    "alignment i32": (
        gb.gguf([gb.pair("general.alignment", gb.I32, struct.pack("<i", 32))]),
        FileFormatError,
        r"has value type 5, must be 4 \(uint32\)",
    ),
    "alignment negative": (
        gb.gguf([gb.pair("general.alignment", gb.I32, struct.pack("<i", -32))]),
        FileFormatError,
        "has value type 5",
    ),
    "alignment string": (
        gb.gguf([gb.pair("general.alignment", gb.STRING, gb.string("32"))]),
        FileFormatError,
        "has value type 8",
    ),
    # tensors
    "5 dimensions": (
        two_tensors(gb.tensor("b", [1] * 5)), FileFormatError, "'b' has 5 dimensions, the limit is",
    ),
    "9 dimensions": (two_tensors(gb.tensor("b", [1] * 9)), FileFormatError, "has 9 dimensions"),
    "2^32-1 dimensions": (
        two_tensors(gb.tensor("b", [1], n_dims=2**32 - 1)), FileFormatError, "4294967295 dimension",
    ),
    "dimension 0": (two_tensors(gb.tensor("b", [16, 0])), FileFormatError, r"\[16, 0\], none may"),
    "F32 bytes wrap": (
        two_tensors(gb.tensor("b", [2**62], offset=64)),
        FileFormatError,
        f"tensor 'b' needs {2**64} bytes at byte .* but the file has",
    ),
    "Q8_0 bytes wrap": (
        two_tensors(gb.tensor("b", [32, 2**58 - 1], gb.TYPE_Q8_0, offset=64)),
        FileFormatError,
        f"tensor 'b' needs {34 * (2**58 - 1)} bytes",
    ),
    "elements wrap": (
        two_tensors(gb.tensor("b", [2**32, 2**32], offset=64)), FileFormatError, f"{2**66} bytes",
    ),
    "rows do not fill blocks": (
        two_tensors(gb.tensor("b", [48], gb.TYPE_Q4_0, offset=64)),
        FileFormatError,
        "tensor 'b': rows of 48 weights do not fill Q4_0 blocks of 32",
    ),
    "offset not aligned": (
        two_tensors(gb.tensor("b", [8], offset=80)), FileFormatError, "'b' has offset 80, no mult",
    ),
    "offset past the end": (
        two_tensors(gb.tensor("b", [8], offset=128)), FileFormatError, "'b' needs 32 bytes at",
    ),
    "offset wraps": (
        two_tensors(gb.tensor("b", [8], offset=2**64 - 32)), FileFormatError, "'b' needs 32 bytes",
    ),
    "tensors overlap": (
        two_tensors(gb.tensor("b", [16], offset=32)), FileFormatError, "the tensor before it reach",
    ),
    "known type": (
        two_tensors(gb.tensor("b", [256], 40, offset=64)), UnsupportedError, r"type 40 \(NVFP4\)",
    ),
    "unknown type": (
        two_tensors(gb.tensor("b", [256], 99, offset=64)), UnsupportedError, r"type 99 \(unknown\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "error", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_by_name(
    tmp_path: Path, raw: bytes, error: type[MartletError], says: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    with gb.bounded(), pytest.raises(error, match=says) as caught:
        GGUFFile.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400


def test_the_hostile_cases_fail_for_their_own_reason(tmp_path: Path) -> None:
    """The file they are variations of is accepted."""
    path = tmp_path / "fine.gguf"
    path.write_bytes(two_tensors(gb.tensor("b", [16], offset=64)))
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["a", "b"]


def test_no_check_is_an_assert_that_optimizing_drops() -> None:
    """The same files under `python -O`."""
    program = (
        "import sys, tempfile, pathlib\n"
        "from martlet.quant.errors import MartletError\n"
        "from martlet.quant.gguf_file import GGUFFile\n"
        "from tests.quant.test_gguf_hostile import HOSTILE\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'hostile.gguf'\n"
        "for raw, error, _ in HOSTILE.values():\n"
        "    path.write_bytes(raw)\n"
        "    try:\n"
        "        GGUFFile.open(path)\n"
        "    except error:\n"
        "        continue\n"
        "    sys.exit(f'opened: {raw[:80]}')\n"
        "path.unlink(), path.parent.rmdir()\n"
        "assert False, 'dropped'\n"
        "print(len(HOSTILE))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(HOSTILE)


def test_a_string_over_the_cap_is_refused(tmp_path: Path) -> None:
    """The string is a hole in a sparse file, so the cap is tested without writing it."""
    path = tmp_path / "long.gguf"
    n = MAX_STRING_BYTES + 1
    for payload, type_id in (
        (gb.string("", length=n), gb.STRING),
        (gb.array(gb.STRING, [gb.string("", length=n)]), gb.ARRAY),
    ):
        raw = gb.gguf([gb.pair("long", type_id, payload)], alignment=1)
        path.write_bytes(raw)
        os.truncate(path, len(raw) + n)
        with gb.bounded(), pytest.raises(FileFormatError, match=f"has {n} bytes, the limit is"):
            GGUFFile.open(path)
