"""Finds and reads all the files of a model that was split into shards.

Owns: shard names, the `split.*` keys, and the checks that need more than one file.
Must not know: how a file is parsed, or what its tensors mean.
Called by `gguf_file.py`. Any shard leads to the whole set; a set is complete or refused.
"""

import re
from pathlib import Path

from .errors import FileFormatError
from .gguf_cursor import quoted
from .gguf_part import GGUFPart, read_part

# Names count from 1, the key `split.no` from 0.
SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
NUMBER_KEY, COUNT_KEY, TENSORS_KEY = "split.no", "split.count", "split.tensors.count"


def read_set(path: Path) -> list[GGUFPart]:
    """The parts of the model that `path` belongs to, in order; one part for a plain file."""
    part = read_part(path)
    paths = _shard_paths(part)
    if paths == [path]:
        return [part]
    parts = [part if shard == path else read_part(shard) for shard in paths]
    for number, shard in enumerate(parts):
        _check_key(shard, COUNT_KEY, len(parts), "the file name says")
        _check_key(shard, NUMBER_KEY, number, "the file name says")
    _check_tensors(parts)
    return parts


def _shard_paths(part: GGUFPart) -> list[Path]:
    path, match = part.path, SHARD_NAME.fullmatch(part.path.name)
    if match is None:
        claimed = part.metadata.get(COUNT_KEY, 1)
        if type(claimed) is not int or claimed > 1:  # 0 is what merging a set leaves behind
            raise FileFormatError(
                f"{path}: {COUNT_KEY} is {quoted(str(claimed))}, but the file is not named like "
                "model-00001-of-00002.gguf; give all shards of the set their names back"
            )
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise FileFormatError(f"{path}: the name says shard {number} of {count}")
    paths = [
        path.with_name(f"{match['prefix']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)
    ]
    for i, shard in enumerate(paths, start=1):
        if not shard.exists():
            raise FileFormatError(f"{shard}: shard {i} of {count} is missing; {path} needs it")
    return paths


def _check_key(part: GGUFPart, key: str, expected: int, source: str) -> None:
    actual = part.metadata.get(key)
    if type(actual) is not int or actual != expected:
        shown = "absent" if actual is None else quoted(str(actual))
        raise FileFormatError(f"{part.path}: {key} is {shown}, but {source} {expected}")


def _check_tensors(parts: list[GGUFPart]) -> None:
    """No name is in two shards, and the count that shards state is the count they hold."""
    home: dict[str, Path] = {}
    for part in parts:
        for name in part.tensors:
            if name in home:
                raise FileFormatError(f"{part.path}: tensor {quoted(name)} is also in {home[name]}")
            home[name] = part.path
    for part in parts:
        # Only the first shard must state it: it is the one that carries the model's metadata.
        if part is parts[0] or TENSORS_KEY in part.metadata:
            _check_key(part, TENSORS_KEY, len(home), "the set has tensors:")
