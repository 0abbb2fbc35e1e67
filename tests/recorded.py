"""Tiny checkpoints of every architecture, as GGUF files, and their logits by `transformers`.

The checkpoints and logits come from scripts/record_checkpoints.py, which needs torch; the files are
converted here when they are first asked for. Three more checkpoints, with real training behind
them, are used where ../shared/data lies beside the repository.
"""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.convert import read_conversion
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.mixtures import find_preset
from martlet.runtime.config import ModelConfig
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.weights import StoredWeights
from martlet.scripts.convert import choose_formats, write_file
from martlet.scripts.convert_facts import reader_facts

RECORDED = Path(__file__).parent / "data" / "checkpoints"
LOGITS = Path(__file__).parent / "data" / "logits"
SHARED = Path(__file__).parents[1].parent / "shared" / "data"
RECIPES = Path(__file__).parent / "data" / "recipes"
_CHECKPOINTS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())
ENCODERS = [
    name for name in _CHECKPOINTS if "reads" in json.loads((RECIPES / f"{name}.json").read_text())
]
TINY = [name for name in _CHECKPOINTS if name not in ENCODERS]
STORED = ("stories260k-hf", "prose-7m-hf", "prose-1m-hf")  # in SHARED, where that is
STORED_COLUMNS = 8  # of their large vocabularies every eighth logit is recorded

RELATIVE_ERROR = 1e-4  # max |a - b| / max |b| for weights, cache and activations in float32

_FOLDER = tempfile.TemporaryDirectory(prefix="martlet-recorded-")  # until the tests end


def checkpoint_of(name: str) -> Path:
    if name not in STORED:
        return RECORDED / name
    if not (SHARED / name).exists():
        pytest.skip(f"no ../shared/data/{name} beside the checkout")
    return SHARED / name


@functools.cache
def gguf_of(name: str) -> Path:
    """The checkpoint as a GGUF file in F32."""
    return convert(checkpoint_of(name), Path(_FOLDER.name) / f"{name}.gguf")


def convert(folder: Path, out: Path, type_: str = "F32") -> Path:
    conversion = read_conversion(folder, reader_facts())
    preset = find_preset(type_)
    formats = choose_formats(conversion, preset)
    write_file(conversion, out, formats, preset.file_type, folder.name, None)
    return out


def recorded_model(name: str, type_: str = "F32") -> tuple[ModelConfig, StoredWeights]:
    """The converted checkpoint, open for as long as the tests run."""
    weights = StoredWeights(_open(name, type_).tensors)
    shapes = {tensor: weights.shape(tensor) or () for tensor in weights.names()}
    return ModelConfig.from_metadata(_open(name, type_).metadata, shapes), weights


def recorded_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(_open(name, "F32").metadata)


@functools.cache
def _open(name: str, type_: str) -> GGUFFile:
    if type_ == "F32":
        return GGUFFile.open(gguf_of(name))
    out = Path(_FOLDER.name) / f"{name}-{type_}.gguf"
    return GGUFFile.open(convert(checkpoint_of(name), out, type_))


def recorded_ids(name: str) -> list[int]:
    with np.load(LOGITS / f"{name}.npz") as data:
        ids: list[int] = data["ids"].tolist()
        return ids


def error_of(name: str, logits: np.ndarray) -> float:
    """How far logits at the recorded ids are from what transformers computed, of the largest."""
    with np.load(LOGITS / f"{name}.npz") as data:
        expected = data["logits"]
    return relative_error(logits[:, ::STORED_COLUMNS] if name in STORED else logits, expected)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
