"""Runs a base and one or more tests over a text and scores every token of their predictions.
Owns where log-probabilities come from, what must agree, and the memory it takes; the mathematics
is in logit_stats.py, the protocol in scored_text.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from martlet.quant.errors import MartletError
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.executors import Executor
from martlet.runtime.machine import memory
from martlet.runtime.model import Model
from martlet.runtime.tokenizer import Tokenizer
from martlet.scripts.base_logits import FLOOR, BaseLogits, is_base_logits, write_base_logits
from martlet.scripts.console import byte_progress
from martlet.scripts.errors import TokensMismatch, VocabularyMismatch
from martlet.scripts.generate import open_model
from martlet.scripts.logit_stats import log_softmax, token_scores
from martlet.scripts.models import find_model
from martlet.scripts.options import LoadOptions
from martlet.scripts.scored_text import rows_per_step, scored_logits, token_chunks, with_bos

SLICE_VALUES = 1 << 20  # float64 log-probabilities made at a time: 8 MiB, whatever the vocabulary
MEMORY_SHARE = 0.5  # of what is available, for tests that are open together
BASE_LOAD = {"kv_type": "f16", "activations": "f32"}  # nothing rounded before products
TOKENS_KEY = "tokenizer.ggml.tokens"

LogProbs = Callable[[slice], np.ndarray]  # some scored positions of a step: float64 (n, vocab)
OnChunk = Callable[[int, str], None]  # chunks done, and a word on the result so far
Progress = Callable[[str, int], contextlib.AbstractContextManager[OnChunk]]


@dataclass(frozen=True)
class Text:
    """What is scored, and how it is cut; None: as a file of base logits has it, or all."""

    content: str | None
    n_ctx: int | None
    n_chunks: int | None


class Base(Protocol):
    """Log-probabilities of the scored positions, chunk by chunk."""

    floor: float
    """Log-probabilities up to it are left out of the divergence."""

    def chunk(self, index: int, tokens: Sequence[int], rows: int) -> Iterator[LogProbs]:
        """One item for each step of `rows` rows that scores anything."""
        ...


@dataclass
class ModelBase:
    """Computed here: float64 on the executor's logits."""

    executor: Executor
    floor: float = -math.inf

    def chunk(self, index: int, tokens: Sequence[int], rows: int) -> Iterator[LogProbs]:
        for _, logits in scored_logits(self.executor, tokens, rows):
            yield partial(log_softmax_of, logits)


@dataclass
class FileBase:
    """Read from a file of base logits, with its 16 bits of precision."""

    file: BaseLogits
    floor: float = FLOOR

    def chunk(self, index: int, tokens: Sequence[int], rows: int) -> Iterator[LogProbs]:
        n, first = len(tokens), len(tokens) // 2
        for start in range(0, n - 1, rows):
            at, end = max(start, first), min(start + rows, n - 1)
            if at < end:
                yield partial(self._log_p, index, at - first)

    def _log_p(self, index: int, at: int, part: slice) -> np.ndarray:
        return self.file.rows(index, slice(at + part.start, at + part.stop))


def log_softmax_of(logits: np.ndarray, part: slice) -> np.ndarray:
    return log_softmax(logits[part])


@dataclass(frozen=True)
class Source:
    """An open base, the chunks it was or will be computed on, and what a test must share."""

    base: Base
    chunks: list[list[int]]  # the text's own tokens; BOS is put in where they are computed
    n_vocab: int
    vocabulary: Sequence[str] | None  # None: the file does not say
    facts: dict[str, Any]

    @property
    def n_ctx(self) -> int:
        return len(self.chunks[0])


@dataclass
class Comparison:
    """Scores of every test on every scored token, and what was compared."""

    base: dict[str, Any]
    n_ctx: int
    tests: list[dict[str, Any]] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)
    """One for each test: TOKEN_SCORES (n_chunks, n_scored)."""


def compare(
    base: str,
    tests: Sequence[str],
    text: Text,
    load: LoadOptions,
    progress: Progress,
    *,
    save_base: Path | None = None,
) -> Comparison:
    """base and tests: as `open_model` takes them; base may be a file of base logits instead.
    As many tests are open together as memory holds; the base is computed once for each such group.
    save_base: a file of base logits to write first, from a base that is a model."""
    with open_source(base, text, load, progress, save_base) as source:
        found = Comparison(source.facts, source.n_ctx)
        for group in groups_that_fit(tests, int(memory().available_bytes * MEMORY_SHARE)):
            with contextlib.ExitStack() as stack:
                models = [
                    stack.enter_context(open_model(test, **load.over_contexts(source.n_ctx)))
                    for test in group
                ]
                for test, model in zip(group, models, strict=True):
                    check_alike(source, test, model, text)
                    found.tests.append({"model": test, **model_facts(model, load.arguments())})
                found.scores += score(source, models, progress)
    return found


@contextlib.contextmanager
def open_source(
    spec: str, text: Text, load: LoadOptions, progress: Progress, save_base: Path | None
) -> Iterator[Source]:
    if is_base_logits(spec):
        if save_base is not None:
            raise MartletError(
                f"{spec} is a file of base logits already; saving them takes a model"
            )
        yield source_of_file(spec, text)
        return
    if text.content is None or text.n_ctx is None:
        raise MartletError(f"comparing with the model {spec} takes a text; name one with -f")
    with open_model(spec, **{**load.over_contexts(text.n_ctx), **BASE_LOAD}) as model:
        chunks = token_chunks(text.content, model.tokenizer, text.n_ctx, text.n_chunks)
        n_vocab = model.config.vocab_size
        if save_base is not None:
            with progress("base logits", len(chunks)) as on_chunk:
                write_base_logits(save_base, chunks, n_vocab, logits_of(model, chunks, on_chunk))
        facts = {"kind": "model", "model": spec, **model_facts(model, BASE_LOAD)}
        vocabulary = model.file.metadata.get(TOKENS_KEY)
        yield Source(ModelBase(model.executor), chunks, n_vocab, vocabulary, facts)


def source_of_file(spec: str, text: Text) -> Source:
    file = BaseLogits.open(Path(spec))
    n_chunks, n_ctx = file.tokens.shape
    if text.n_ctx not in (None, n_ctx):
        raise MartletError(f"{spec} has chunks of {n_ctx} tokens; take -c {n_ctx}")
    taken = min(text.n_chunks or n_chunks, n_chunks)
    chunks = file.tokens[:taken].tolist()
    facts = {"kind": "base logits", "file": spec}
    return Source(FileBase(file), chunks, file.n_vocab, None, facts)


def model_facts(model: Model, load: dict[str, Any]) -> dict[str, Any]:
    """What a figure depends on beside the file."""
    return {
        "activations": load["activations"],
        "kv_type": load["kv_type"],
        "executor": model.executor.name,
        "isa": getattr(model.executor, "isa", None),
    }


def groups_that_fit(specs: Sequence[str], budget_bytes: int) -> list[list[str]]:
    """In order; a group of one may exceed the budget."""
    groups: list[list[str]] = []
    used = 0
    for spec in specs:
        n_bytes = loaded_bytes(spec)
        if not groups or used + n_bytes > budget_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += n_bytes
    return groups


def loaded_bytes(spec: str) -> int:
    """Roughly what an open model takes: its weights, packed anew."""
    with byte_progress() as progress:
        path = find_model(spec, progress=progress)
    with GGUFFile.open(path) as file:
        return file.n_bytes


def check_alike(source: Source, spec: str, model: Model, text: Text) -> None:
    """Differences that would make a divergence meaningless."""
    n_vocab = model.config.vocab_size
    if n_vocab != source.n_vocab:
        raise VocabularyMismatch(
            f"{spec} predicts {n_vocab} tokens, the base {source.n_vocab}; compare files of one"
            " model"
        )
    mine = model.file.metadata.get(TOKENS_KEY, [])
    for id_, (theirs, token) in enumerate(zip(source.vocabulary or mine, mine, strict=False)):
        if theirs != token:
            raise VocabularyMismatch(
                f"token {id_} is {token!r} in {spec} and {theirs!r} in the base; compare files of"
                " one model"
            )
    if text.content is not None:
        check_tokens(source.chunks, spec, model.tokenizer, text.content)


def check_tokens(
    chunks: Sequence[Sequence[int]], spec: str, tokenizer: Tokenizer, content: str
) -> None:
    n_ctx = len(chunks[0])
    mine = token_chunks(content, tokenizer, n_ctx, len(chunks))
    for i, (theirs, tokens) in enumerate(zip(chunks, mine, strict=False)):
        for j, (a, b) in enumerate(zip(theirs, tokens, strict=True)):
            if a != b:
                raise TokensMismatch(
                    f"token {i * n_ctx + j} of the text is {b} for {spec} and {a} for the base;"
                    " the tokenizers differ, or the base was computed on another text"
                )
    if len(mine) < len(chunks):
        raise TokensMismatch(
            f"the text has {len(mine)} chunks of {n_ctx} tokens for {spec}, the base"
            f" {len(chunks)}; it was computed on another text"
        )


def score(source: Source, models: Sequence[Model], progress: Progress) -> list[np.ndarray]:
    """For each model TOKEN_SCORES (n_chunks, n_scored)."""
    executors = [model.executor for model in models]
    rows = min(rows_per_step(executor, source.n_vocab) for executor in executors)
    # All share a vocabulary, so that the first one's BOS is everybody's.
    chunks = with_bos(source.chunks, models[0].tokenizer)
    parts = []
    with progress("mean KL", len(chunks)) as on_chunk:
        for i, tokens in enumerate(chunks):
            parts.append(compare_chunk(source.base, executors, i, tokens, rows))
            means = np.stack(parts)["kl"].mean(axis=(0, 2))
            on_chunk(i + 1, " ".join(f"{mean:.5f}" for mean in means[:4]))
    return list(np.stack(parts, axis=1))


def compare_chunk(
    base: Base, tests: Sequence[Executor], index: int, tokens: Sequence[int], rows: int
) -> np.ndarray:
    """TOKEN_SCORES (n_tests, n_scored) of one chunk; all sides go through it step by step."""
    sides = [scored_logits(executor, tokens, rows) for executor in tests]
    parts = []
    for base_rows, *steps in zip(base.chunk(index, tokens, rows), *sides, strict=True):
        targets, logits = steps[0]
        n_rows = max(1, SLICE_VALUES // logits.shape[1])
        for start in range(0, len(targets), n_rows):
            part = slice(start, min(start + n_rows, len(targets)))
            log_p = base_rows(part)
            scores = [
                token_scores(log_p, log_softmax(mine[part]), targets[part], base.floor)
                for _, mine in steps
            ]
            parts.append(np.stack(scores))
    return np.concatenate(parts, axis=1)


def logits_of(model: Model, chunks: Sequence[list[int]], on_chunk: OnChunk) -> Iterator[np.ndarray]:
    """float32 (n, vocab) of the scored positions of all chunks, in order."""
    rows = rows_per_step(model.executor, model.config.vocab_size)
    for i, tokens in enumerate(with_bos(chunks, model.tokenizer)):
        for _, logits in scored_logits(model.executor, tokens, rows):
            yield logits
        on_chunk(i + 1, "")
