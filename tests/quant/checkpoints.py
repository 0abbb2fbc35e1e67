"""Checkpoint folders to change: copies of the recorded ones, and files written here by hand."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from martlet.quant.safetensors_file import SafetensorsFile

from ..recorded import RECORDED

_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


def copied(name: str, folder: Path) -> Path:
    """A recorded checkpoint that may be changed."""
    to = folder / name
    shutil.copytree(RECORDED / name, to)
    return to


def edit_json(path: Path, *drop: str, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({key: v for key, v in values.items() if key not in drop}))


def stored_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor as it is stored; uint16 is BF16."""
    arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in SafetensorsFile.open(path).tensors.items():
            dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}[tensor.dtype]
            arrays[name] = tensor.data.view(dtype).reshape(tensor.shape).copy()
    return arrays


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    header, blobs, at = {}, [], 0
    for name, array in arrays.items():
        blob = np.ascontiguousarray(array).tobytes()
        place = [at, at + len(blob)]
        dtype = _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        blobs.append(blob)
        at += len(blob)
    write_raw(path, header, b"".join(blobs))
    return path


def write_raw(path: Path, header: Any, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def rewrite(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces all weights of a checkpoint."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    write_safetensors(folder / "model.safetensors", arrays)
