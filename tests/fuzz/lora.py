"""Adapter files: refused with a typed error, or factors whose shapes fit each other."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from martlet.quant.errors import MartletError
from martlet.runtime.adapters import Adapter, AdapterFile

from ..quant import gguf_bytes as gb
from .memory_file import MemoryFile

FILE = MemoryFile()
MOST_BYTES = 2048


def run(data: bytes) -> None:
    with contextlib.suppress(MartletError):
        adapter = Adapter.open(AdapterFile(FILE.holding(data), "a"), "llama")
        for name in adapter.file.tensors:
            parts = adapter.parts_of(name.removesuffix(".lora_a").removesuffix(".lora_b"))
            assert parts is None or (parts.rank > 0 and abs(parts.scale) >= 0)
        adapter.file.close()


def seeds() -> Iterator[bytes]:
    def text(key: str, value: str) -> bytes:
        return gb.pair(key, gb.STRING, gb.string(value))

    kind = [
        text("general.type", "adapter"),
        text("adapter.type", "lora"),
        text("general.architecture", "llama"),
        gb.pair("adapter.lora.alpha", gb.F32, struct.pack("<f", 8.0)),
    ]
    name = "blk.0.attn_q.weight"
    factors = [gb.tensor(f"{name}.lora_a", [4, 2]), gb.tensor(f"{name}.lora_b", [2, 4], offset=32)]
    yield gb.gguf(kind, factors, bytes(64))
    yield gb.gguf(kind, [gb.tensor("token_embd.weight.lora_a", [4, 2], 1)], bytes(64))
    yield gb.gguf(kind[:3], factors[:1], bytes(64))
