"""GGUF files: refused with a typed error, or every tensor lies inside and can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from martlet.quant.errors import MartletError
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_part import read_stored_fields

from ..quant import gguf_bytes as gb
from .memory_file import MemoryFile

FILE = MemoryFile()
MOST_BYTES = 4096


def run(data: bytes) -> None:
    path = FILE.holding(data)
    with contextlib.suppress(MartletError), GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            assert tensor.n_bytes == tensor.format.data_bytes(tensor.shape) <= len(data)
            assert len(bytes(tensor.data)) == tensor.n_bytes
        assert read_stored_fields(path).keys() == file.metadata.keys()


def seeds() -> Iterator[bytes]:
    yield gb.tiny()
    yield gb.gguf([gb.pair("general.architecture", gb.STRING, gb.string("llama"))])
    yield gb.gguf([gb.u32_pair("general.alignment", 64)], [gb.tensor("a", [4, 3])], bytes(64))
    yield gb.gguf([gb.pair("a", gb.ARRAY, gb.array(gb.STRING, [gb.string("b")] * 3))], version=2)
    # a set of one shard, and one whose others are missing
    for n_shards in (1, 2):
        split = [("split.no", 0), ("split.count", n_shards), ("split.tensors.count", 0)]
        yield gb.gguf([gb.u32_pair(key, value) for key, value in split])
