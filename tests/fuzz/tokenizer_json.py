"""Tokenizer files of a checkpoint, converted: refused with a typed error, or ids that decode.

An input is the folder: its JSON files by name, in one JSON object of texts or objects.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert_tokenizer import convert_tokenizer
from martlet.quant.errors import MartletError
from martlet.quant.safetensors_file import parse_json
from martlet.runtime.tokenizer import Tokenizer
from martlet.scripts.convert_facts import reader_facts

from ..recorded import RECORDED

MOST_BYTES = 16384
FACTS = reader_facts()
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
TEXT = "Hello  wörld\n\n<|im_end|> 123 \U0001f600"


class FolderInMemory(Checkpoint):
    """Files of a checkpoint's folder out of a dictionary, read as those on disk are."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Path("folder"), {}, ())
        object.__setattr__(self, "_texts", files)

    def json(self, name: str) -> dict[str, Any]:
        raw = self.raw(name)
        value = {} if raw is None else parse_json(raw, f"{name}:")
        if not isinstance(value, dict):
            raise MartletError(f"{name}: is not a JSON object")
        return value

    def text(self, name: str) -> str | None:
        raw = self.raw(name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError:
            raise MartletError(f"{name}: is not UTF-8") from None

    def raw(self, name: str) -> bytes | None:
        return self._texts.get(name)  # type: ignore[attr-defined, no-any-return]


def convert(files: dict[str, bytes], n_rows: int) -> None:
    with contextlib.suppress(MartletError):
        folder = FolderInMemory(files)
        converted = convert_tokenizer(folder, folder.json("config.json"), n_rows, FACTS)
        tokenizer = Tokenizer.from_metadata(converted.metadata)
        ids = tokenizer.encode(TEXT, add_special=True, parse_special=True)
        assert all(0 <= id_ < n_rows for id_ in ids)
        tokenizer.decode(ids, special=True)


def run(data: bytes) -> None:
    """Files one behind another, a NUL between them; how many rows the embedding has before all."""
    n_rows, _, rest = data.partition(b"\n")
    if not n_rows.isdigit() or len(n_rows) > 4 or int(n_rows) < 1:
        return
    convert(dict(zip(FILES, rest.split(b"\0"), strict=False)), int(n_rows))


def seeds() -> Iterator[bytes]:
    for name, n_tokens in (("llama", 60), ("gemma3", 40), ("bert", 30)):
        folder = RECORDED / name
        tokenizer = (
            json.loads((folder / "tokenizer.json").read_text())
            if (folder / "tokenizer.json").exists()
            else None
        )
        if tokenizer is None:
            continue
        model = tokenizer["model"]
        kept = sorted(model["vocab"].items(), key=lambda row: row[1])
        kept = [row for row in kept if row[1] < n_tokens]
        model["vocab"] = dict(kept)
        merges = model.get("merges")
        if merges is not None:
            texts = model["vocab"]
            split = [m if isinstance(m, list) else m.split(" ") for m in merges]
            model["merges"] = [m for m in split if "".join(m) in texts]
        added = [token for token in tokenizer["added_tokens"] if token["id"] < n_tokens]
        tokenizer["added_tokens"] = added
        raws = [json.dumps(tokenizer, ensure_ascii=False).encode()]
        for other in FILES[1:]:
            path = folder / other
            raws.append(path.read_bytes() if path.exists() else b"{}")
        yield str(n_tokens).encode() + b"\n" + b"\0".join(raws)
