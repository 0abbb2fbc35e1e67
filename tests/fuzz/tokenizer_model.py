"""tokenizer.model, SentencePiece's own file: refused with a typed error, or ids that decode."""

from __future__ import annotations

from collections.abc import Iterator

from ..recorded import RECORDED
from .tokenizer_json import convert

MOST_BYTES = 4096
CONFIG = b'{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}'


def run(data: bytes) -> None:
    convert({"tokenizer.model": data, "tokenizer_config.json": CONFIG}, 300)


def seeds() -> Iterator[bytes]:
    whole = (RECORDED / "mistral" / "tokenizer.model").read_bytes()
    yield whole[:3000]
    piece = b"\x0a\x0a\x0a\x03abc\x15\0\0\x80\xbf"
    yield piece * 3 + b"\x12\x02\x18\x02"
    yield b"\x0a\x07\x0a\x05<unk>\x18\x02" + piece + b"\x12\x04\x18\x02\x28\x04\x1a\x02\x18\x01"
