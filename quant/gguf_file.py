"""Opens a GGUF model, plain or in shards, as metadata and read-only tensor views.

Owns: the public reader and how long the map lives. Must not know: parsing (`gguf_part.py`), shard
names (`gguf_shards.py`), or which keys and tensors a model needs.
"""

import mmap
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import MartletError
from .file_map import map_under
from .gguf_part import GGUFPart, GGUFTensor
from .gguf_shards import read_set

__all__ = ["GGUFFile", "GGUFTensor"]


class GGUFFile:
    """A model file whose tensors are mapped, not read.

    Metadata values are int, float, str or bool; arrays are list[str], list[bool], or a NumPy array
    for numbers. Array strings that are not UTF-8 hold lone surrogates: encode them with
    "surrogateescape" to get the bytes back. Metadata of a set is that of its first shard.
    """

    def __init__(self, path: Path, parts: list[GGUFPart]) -> None:
        first = parts[0]
        self.path = path
        self.paths = [part.path for part in parts]
        self.metadata_path = first.path  # a set keeps it in its first shard
        self.n_bytes = sum(part.n_bytes for part in parts)
        self.version = first.version
        self.alignment = first.alignment
        self.metadata: dict[str, Any] = first.metadata
        self._tensors: dict[str, GGUFTensor] | None = {
            name: tensor for part in parts for name, tensor in part.tensors.items()
        }

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "GGUFFile":
        """Reads and checks everything but the weights; raises FileFormatError, UnsupportedError."""
        return cls(Path(path), read_set(Path(path)))

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        if self._tensors is None:
            raise MartletError(f"{self.path}: is closed, its tensors are gone; open it again")
        return self._tensors

    def drop_pages(self) -> None:
        """Gives back the memory of what was read so far; a page read again comes from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            data = (tensor.data for tensor in self.tensors.values())
            maps = {id(m): m for m in map(map_under, data) if m is not None}
            for mapped in maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Lets go of the map; metadata stays.

        A tensor or view that the caller still holds keeps its file mapped until it is dropped:
        pulling the memory from under it would end the process instead of raising.
        """
        self._tensors = None

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
