"""Opens a checkpoint folder of Hugging Face form: weights in one file or shards, and JSON files.

Owns: which files belong together, and that none is missing. Must not know: what a config or a
tensor means (convert*.py), or how a safetensors file looks inside.
"""

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import FileFormatError, UnsupportedError
from .safetensors_file import SafetensorsFile, SourceTensor, parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_TEXT_BYTES = 200_000_000  # tokenizer.json of a vocabulary of 262,144 has 33 MB
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open checkpoint; weights are mapped, not read."""

    folder: Path
    tensors: dict[str, SourceTensor]
    _files: tuple[SafetensorsFile, ...]

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> "Checkpoint":
        """Raises FileFormatError or UnsupportedError, naming the shard, file or tensor."""
        folder = Path(folder)
        if not folder.is_dir():
            raise FileFormatError(f"{folder}: is not a folder; a checkpoint is one, with a config")
        files = _open_files(folder)
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        return cls(folder, tensors, tuple(files))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the folder; empty where there is no such file."""
        return _read_json(self.folder / name)

    def text(self, name: str) -> str | None:
        raw = _read(self.folder / name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError:
            raise FileFormatError(f"{self.folder / name}: is not UTF-8") from None

    def raw(self, name: str) -> bytes | None:
        return _read(self.folder / name)

    def drop_pages(self) -> None:
        for file in self._files:
            file.drop_pages()


def _read(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    n_bytes = path.stat().st_size
    if n_bytes > MAX_TEXT_BYTES:
        raise FileFormatError(f"{path}: has {n_bytes} bytes, at most {MAX_TEXT_BYTES} are read")
    return path.read_bytes()


def _read_json(path: Path) -> dict[str, Any]:
    raw = _read(path)
    if raw is None:
        return {}
    value = parse_json(raw, f"{path}:")
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: is not a JSON object")
    return value


def _open_files(folder: Path) -> list[SafetensorsFile]:
    if (folder / SINGLE).is_file():
        return [SafetensorsFile.open(folder / SINGLE)]
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    others = sorted(p.name for pattern in _OTHER_WEIGHTS for p in folder.glob(pattern))
    if others:
        raise UnsupportedError(
            f"{folder}: holds {others[0]}; only weights in safetensors form are converted"
        )
    lone = sorted(p.name for p in folder.glob("*.safetensors"))
    found = f" beside {lone[0]}" if lone else ""
    raise FileFormatError(f"{folder}: has neither {SINGLE} nor {INDEX}{found}; fetch it again")


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """All shards of the index, which must name exactly the tensors that they hold."""
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise FileFormatError(f"{folder / INDEX}: has no weight_map from tensors to files")
    files = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise FileFormatError(
                f"{folder / INDEX}: names {name!r}, which is not a plain file name"
            )
        if not os.path.isfile(folder / name):  # no error for a name that no file could have
            raise FileFormatError(f"{folder}: shard {name[:80]!r} is missing; fetch it again")
        files[name] = SafetensorsFile.open(folder / name)
    for tensor, name in places.items():
        if tensor not in files[name].tensors:
            raise FileFormatError(f"{folder}: {INDEX} finds {tensor!r} in {name}, which lacks it")
    for name, file in files.items():
        for tensor in file.tensors:
            if places.get(tensor) != name:
                raise FileFormatError(f"{folder}: {name} holds {tensor!r}, which {INDEX} lacks")
    return list(files.values())
