"""A checkpoint folder to a GGUF file: everything is read and checked, then it is written once.

Owns: the order of the steps, the metadata that is not the architecture's, and the streaming of
weights. Must not know: single tensors, tokens or block formats; whether the result computes the
same (scripts/convert_check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .convert_config import Settings, read_settings
from .convert_families_encoder import SEGMENTS
from .convert_family import Nextn
from .convert_nextn import count_blocks
from .convert_sentence import read_sentence
from .convert_tensors import Weight, ignored_tensors, plan_weights
from .convert_tokenizer import ReaderFacts, convert_tokenizer
from .encode import BadWeights, compiled_ahead, encode, threads_of
from .errors import FileFormatError
from .formats import FORMATS
from .gguf_field import Field
from .gguf_write import OutTensor, write_gguf

# What Qwen3's rerankers were trained to be asked, from their model card.
_QWEN3_RERANK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SLICE_WEIGHTS = 1 << 24  # read, rounded and packed at a time


@dataclass(frozen=True, eq=False)
class Conversion:
    """A checkpoint that can be written: read and checked, except for the values of weights."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    settings: Settings
    weights: list[Weight]
    tokenizer: dict[str, Any]  # metadata under tokenizer.* and general.sampling.*
    notes: list[str] = field(default_factory=list)  # what a person should know
    pooling_type: int | None = None  # None: the checkpoint does not say

    @property
    def stored_type(self) -> str:
        """The type that keeps every bit of the matrices: their own, F32 where they differ. Those in
        blocks are left aside."""
        types = {w.source.dtype for w in self.weights if w.source and len(w.shape) > 1}
        types.discard("MXFP4")
        return types.pop() if len(types) == 1 else "F32"

    @property
    def in_blocks(self) -> dict[str, str]:
        """Formats of the tensors that the checkpoint itself holds in blocks."""
        return {w.name: "MXFP4" for w in self.weights if w.source and w.source.dtype == "MXFP4"}

    @property
    def vocab_size(self) -> int:
        return self.weights[0].n_rows

    def metadata(self, name: str, file_type: int) -> dict[str, Any]:
        arch = self.settings.family.arch
        return {
            "general.architecture": arch,
            "general.type": "model",
            "general.name": name,
            "general.file_type": file_type,
            "general.quantization_version": 2,
            **self.settings.metadata(),
            **({} if self.pooling_type is None else {f"{arch}.pooling_type": self.pooling_type}),
            f"{arch}.vocab_size": self.vocab_size,
            **self.tokenizer,
        }


def read_conversion(
    folder: str | PathLike[str], facts: ReaderFacts, *, nextn: bool = True
) -> Conversion:
    """Raises FileFormatError or UnsupportedError where the checkpoint cannot be converted. nextn:
    whether to write blocks that predict further tokens, where there are any."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.json("config.json")
    if not config:
        raise FileFormatError(f"{checkpoint.folder}: has no config.json; fetch it too")
    settings = read_settings(config)
    if nextn and settings.family.nextn is Nextn.WRITTEN:
        settings = replace(settings, n_nextn=count_blocks(checkpoint.tensors, settings.n_layers))
    weights = plan_weights(settings, checkpoint.tensors)
    sentence = read_sentence(checkpoint)
    weights += [
        Weight(f"dense_{n}.weight", tensor.shape, tensor)
        for n, tensor in enumerate(sentence.dense, 2)
    ]
    if sentence.labels:
        weights.append(_classifier(weights, sentence.labels))
    try:
        tokenizer = convert_tokenizer(checkpoint, config, weights[0].n_rows, facts)
    except RecursionError:
        raise FileFormatError(f"{checkpoint.folder}: tokenizer.json is nested too deeply") from None
    notes = list(tokenizer.notes)
    if ignored := ignored_tensors(checkpoint.tensors):
        notes.append(f"{len(ignored)} tensors are not of the language model: {ignored[0]}, …")
    if settings.family.arch in ("llama", "phi3") and any(settings.is_local):
        notes.append(f"llama.cpp does not know the window of {settings.window} tokens in this file")
    metadata, pooling_type = tokenizer.metadata, sentence.pooling_type
    if sentence.labels and settings.family.arch == "qwen3":
        metadata["tokenizer.chat_template.rerank"] = _QWEN3_RERANK
    if segments := settings.table_rows.get(SEGMENTS):
        metadata["tokenizer.ggml.token_type_count"] = segments
    return Conversion(checkpoint, config, settings, weights, metadata, notes, pooling_type)


def _classifier(weights: list[Weight], labels: tuple[int, ...]) -> Weight:
    """Rows of the output matrix, which is the embedding where there is none of its own."""
    head = next((w for w in weights if w.name == "output.weight"), weights[0])
    if max(labels) >= head.n_rows:
        raise FileFormatError(f"tokens {labels} of yes and no: there are {head.n_rows}")
    rows = np.concatenate([head.rows(id_, id_ + 1) for id_ in labels])
    return Weight("cls.output.weight", rows.shape, values=rows)


def write_conversion(
    conversion: Conversion,
    path: str | PathLike[str],
    *,
    formats: Mapping[str, str],
    file_type: int,
    name: str,
    threads: int | None = None,
    on_tensor: Callable[[OutTensor], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Writes the file and returns its bytes. `formats`: the format of every tensor by name;
    `check` is that of `write_gguf`.

    Memory holds one tensor as it is written and a slice of it as float32. The same checkpoint
    gives the same bytes.
    """
    values = conversion.metadata(name, file_type)
    fields = {
        key: value if isinstance(value, Field) else Field.of(value) for key, value in values.items()
    }
    names = [formats[weight.name] for weight in conversion.weights]
    with threads_of(1) as compiler, compiled_ahead(names, compiler) as wait_for:

        def data_of(weight: Weight) -> np.ndarray:
            wait_for(formats[weight.name])
            packed = packed_weight(weight, formats[weight.name], threads)
            conversion.checkpoint.drop_pages()
            return packed

        tensors = [
            OutTensor(w.name, w.shape, FORMATS[formats[w.name]], partial(data_of, w))
            for w in conversion.weights
        ]
        return write_gguf(path, fields, tensors, on_tensor=on_tensor, check=check)


def packed_weight(weight: Weight, format_name: str, threads: int | None = None) -> np.ndarray:
    """uint8 (n_bytes,): a slice of rows at a time is read and packed."""
    cols = weight.shape[-1]
    n_rows = weight.n_rows if len(weight.shape) > 1 else 1
    out = np.empty((n_rows, FORMATS[format_name].data_bytes((cols,))), np.uint8)
    step = max(1, SLICE_WEIGHTS // cols)
    for start in range(0, n_rows, step):
        stop = min(start + step, n_rows)
        # A vector is one row of the file, though many of one value in the checkpoint.
        rows = weight.rows(start, stop) if len(weight.shape) > 1 else weight.rows(0, cols)[None]
        try:
            out[start:stop] = encode(rows, format_name, threads=threads)
        except BadWeights as error:
            where = f" from row {start} on" if start else ""
            raise BadWeights(f"tensor {weight.name!r}{where}: {error}") from None
    return out.reshape(-1)
