"""Files of a base model's log-probabilities, as `llama-perplexity --kl-divergence-base` writes.
Owns the format, both ways; must not know which model is behind it or what it is compared with.

Layout, little-endian, after tools/perplexity/perplexity.cpp of llama.cpp:

    | "_logits_" | i32 n_ctx | i32 n_vocab | i32 n_chunks | n_chunks x n_ctx x i32 token |
    | per scored token: f32 scale, f32 least, u16 value of each token, padded to an even number |

ln p = scale · value + least. Logits more than 16 below the largest share the value 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from martlet.quant.errors import FileFormatError
from martlet.quant.whole_file import check_space, whole_or_nothing
from martlet.runtime.errors import ModelError
from martlet.scripts.scored_text import n_scored

MAGIC = b"_logits_"
RANGE = 16.0  # nats below the largest logit that are kept
FLOOR = -RANGE  # tokens below are left out of a divergence, as llama-perplexity does
STEPS = 65535
MAX_VOCAB = 1 << 24
MOST_LN_P = 1e-3  # 0 but for half a step of 16 bits and float32
HEAD = np.dtype([("n_ctx", "<i4"), ("n_vocab", "<i4"), ("n_chunks", "<i4")])


def record_dtype(n_vocab: int) -> np.dtype:
    n_values = n_vocab + n_vocab % 2
    return np.dtype([("scale", "<f4"), ("least", "<f4"), ("values", "<u2", (n_values,))])


def file_bytes(n_ctx: int, n_vocab: int, n_chunks: int) -> int:
    per_chunk = 4 * n_ctx + n_scored(n_ctx) * record_dtype(n_vocab).itemsize
    return len(MAGIC) + HEAD.itemsize + n_chunks * per_chunk


def encode(logits: np.ndarray) -> np.ndarray:
    """float32 (n, vocab) to records (n)."""
    n, n_vocab = logits.shape
    records = np.zeros(n, record_dtype(n_vocab))
    largest = logits.max(axis=1)
    least = np.maximum(logits.min(axis=1), largest - np.float32(RANGE))
    sums = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    scale = (largest - least) / np.float32(STEPS)
    scale[scale < np.finfo(np.float32).tiny] = 0  # such a range has no inverse, and is none
    records["scale"] = scale
    records["least"] = least - largest - np.log(sums).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    above = np.maximum(logits - least[:, None], 0)
    records["values"][:, :n_vocab] = np.minimum(np.rint(above * inverse[:, None]), STEPS)
    return records


def decode(records: np.ndarray, n_vocab: int) -> np.ndarray:
    """Records (n) to float64 ln p (n, vocab)."""
    values = records["values"][:, :n_vocab].astype(np.float32)
    return (records["scale"][:, None] * values + records["least"][:, None]).astype(np.float64)


@dataclass(frozen=True, eq=False)
class BaseLogits:
    """An open file. `tokens` are the text's own: BOS is put in when they are computed."""

    path: Path
    n_vocab: int
    tokens: np.ndarray  # int32 (n_chunks, n_ctx)
    records: np.ndarray = field(repr=False)  # (n_chunks, n_scored), mapped

    @classmethod
    def open(cls, path: Path) -> BaseLogits:
        n_bytes = path.stat().st_size
        start = len(MAGIC) + HEAD.itemsize
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC or n_bytes < start:
                raise FileFormatError(f"{path} is no file of base logits: it must begin {MAGIC!r}")
            head = np.frombuffer(file.read(HEAD.itemsize), HEAD)[0]
        n_ctx, n_vocab, n_chunks = (int(value) for value in head)
        if n_ctx < 4 or not 0 < n_vocab <= MAX_VOCAB or n_chunks < 1:
            raise FileFormatError(
                f"{path} claims {n_chunks} chunks of {n_ctx} tokens from {n_vocab}; it is damaged"
            )
        needed = file_bytes(n_ctx, n_vocab, n_chunks)
        if n_bytes != needed:
            raise FileFormatError(
                f"{path} has {n_bytes} bytes, {n_chunks} chunks of {n_ctx} tokens from {n_vocab}"
                f" need {needed}; it was cut short or is damaged, write it again"
            )
        shape = n_chunks, n_ctx
        tokens = np.fromfile(path, "<i4", n_chunks * n_ctx, offset=start).reshape(shape)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise FileFormatError(f"{path} has token ids outside 0..{n_vocab - 1}; it is damaged")
        records = np.memmap(
            path, record_dtype(n_vocab), "r", start + tokens.nbytes, (n_chunks, n_scored(n_ctx))
        )
        return cls(path, n_vocab, tokens, records)

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    def rows(self, chunk: int, part: slice) -> np.ndarray:
        """float64 ln p (n, vocab) of some scored positions."""
        records = np.asarray(self.records[chunk, part])
        log_p = decode(records, self.n_vocab)
        if not np.isfinite(log_p).all():
            raise FileFormatError(f"{self.path}: chunk {chunk} has values that are no numbers")
        if log_p.max() > MOST_LN_P:
            raise FileFormatError(
                f"{self.path}: chunk {chunk} has probabilities above 1; write the file again"
            )
        return log_p


def is_base_logits(spec: str) -> bool:
    path = Path(spec)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def write_base_logits(
    path: Path, chunks: Sequence[Sequence[int]], n_vocab: int, logits: Iterable[np.ndarray]
) -> None:
    """logits: float32 (n, vocab) of the scored positions of all chunks, in order.
    The file appears when it is whole."""
    tokens = np.asarray(chunks, "<i4")
    n_chunks, n_ctx = tokens.shape
    needed = file_bytes(n_ctx, n_vocab, n_chunks)
    check_space(path.resolve().parent, needed, "the base logits", "take fewer --chunks")
    with whole_or_nothing(path) as file:
        file.write(MAGIC)
        file.write(np.array((n_ctx, n_vocab, n_chunks), HEAD).tobytes())
        file.write(tokens.tobytes())
        for values in logits:
            if not np.isfinite(values.max(axis=1)).all():  # NaN is the largest of any row it is in
                raise ModelError("the base's logits are not finite; its file is damaged")
            file.write(encode(values).tobytes())
