"""Statistics of a model on a text, and what they say about each matrix in each format.
Owns the split of the text and the estimates (expected KL divergence of a choice); must not know
budgets, files written, or the command line. Method: docs/quantization.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import numpy as np
from martlet.quant.allocate import Choice
from martlet.quant.encode import encode
from martlet.quant.errors import MartletError
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.gptq import SHRINKAGES, Feedback, layer_error, quantize_rows
from martlet.runtime.calibration import Calibrator, InputMoments
from martlet.runtime.config import ModelConfig
from martlet.runtime.machine import memory
from martlet.runtime.weights import WeightSource
from martlet.scripts.calibrated_stacks import Stack, stacks_of
from martlet.scripts.trial import Trial

# Formats worth their bytes, by the block that a row must be a multiple of.
CANDIDATES = {
    256: ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0"),
    32: ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    1: ("F16",),
}
PROBE = {256: "Q4_K", 32: "IQ4_NL"}  # in which the effect of feedback is measured
TRIAL_TOKENS = 1024  # of trial runs at most; none of them enters the moments
LEAST_TRIAL_TOKENS = 512
TRIAL_TEXTS = 8  # at least: prices from one or two texts are those of their subjects
TRIAL_PRODUCTS = 2e12  # multiplications of all trial runs together, about: minutes on two cores
SAMPLE_ROWS = 64  # of a matrix, whose errors stand for all rows
PRICED_ROWS = 4096  # of a matrix, whose errors stand for all rows in a trial
LEAST_TOKENS = 4096
EMBEDDING = "token_embd.weight"


class TextTooShort(MartletError):
    """The calibration text gives too few tokens for its statistics."""


@dataclass(frozen=True)
class Texts:
    """Chunks of tokens: for moments, in two halves, and for trial runs."""

    halves: tuple[list[list[int]], list[list[int]]]
    trial: list[list[int]]

    @classmethod
    def split(
        cls, chunks: Sequence[list[int]], most_tokens: int, trial_tokens: int = TRIAL_TOKENS
    ) -> Texts:
        """Spread over the whole text, each kind evenly. Of chunks for trials the beginnings are
        taken, so that there are several."""
        context = len(chunks[0]) if chunks else 1
        n_wanted = max(TRIAL_TEXTS, trial_tokens // context)
        n_trial = max(1, min(n_wanted, len(chunks) // 4))
        n_tokens = min(context, trial_tokens // n_trial)
        n_used = min(len(chunks), n_trial + max(2, most_tokens // context))
        if n_used * context < LEAST_TOKENS or n_used < n_trial + 2:
            raise TextTooShort(
                f"the calibration text has {len(chunks) * context} tokens, {LEAST_TOKENS} are the "
                "least; take a longer one"
            )
        used = [chunks[i * len(chunks) // n_used] for i in range(n_used)]
        trial = {(2 * i + 1) * n_used // (2 * n_trial) for i in range(n_trial)}
        rest = [chunk for i, chunk in enumerate(used) if i not in trial]
        return cls((rest[0::2], rest[1::2]), [used[i][:n_tokens] for i in sorted(trial)])


@dataclass
class Matrix:
    """A weight that products read, and what the text says of it."""

    name: str
    shape: tuple[int, int]
    seen: InputMoments
    unseen: InputMoments
    is_multiplied: bool = True  # or else its rows are taken, as an embedding's
    shrinkage: float = 1.0  # 1: rounding without feedback is better
    gain: float = 1.0  # layer error on unseen tokens with feedback, of that without
    errors: dict[str, float] = field(default_factory=dict)
    """Format -> layer error on unseen tokens without feedback, summed over rows."""
    sensitivity: float = 0.0  # KL divergence per layer error

    @property
    def role(self) -> str:
        """The name without its layer."""
        return ".".join(part for part in self.name.split(".") if not part.isdigit())

    def moment(self) -> np.ndarray:
        """float64 (cols, cols), E[x xT] over all tokens."""
        return self.seen.joined(self.unseen).mean_products()

    def error(self, values: np.ndarray, rounded: np.ndarray) -> float:
        """The layer error, summed over rows; of many rows by a sample."""
        return _priced_error(values, rounded, self.moment())

    def choices(self) -> list[Choice]:
        return [
            Choice(name, FORMATS[name].data_bytes(self.shape), self.cost(name))
            for name in self.errors
        ]

    def cost(self, format_name: str) -> float:
        """Expected KL divergence in nats per token."""
        return self.sensitivity * self.errors[format_name] * self.gain


def trial_tokens(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Tokens of trial runs that keep their work bounded: each matrix is tried, and each trial
    runs about half of the layers."""
    sizes = [prod(shape) for name, shape in shapes.items() if len(shape) > 1 and name != EMBEDDING]
    most = TRIAL_PRODUCTS / max(1.0, len(sizes) * sum(sizes) / 2)
    return int(min(TRIAL_TOKENS, max(LEAST_TRIAL_TOKENS, most)))


def formats_for(cols: int) -> tuple[str, ...]:
    return next(names for block, names in CANDIDATES.items() if cols % block == 0)


def observe(
    config: ModelConfig,
    weights: WeightSource,
    texts: Texts,
    *,
    threads: int | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> tuple[list[Matrix], list[Stack]]:
    """Runs the text; matrices, and stacks of them, in the order in which the model reads them."""
    context = len(texts.halves[0][0])
    runner = Calibrator(config, weights, context=context, full=True, threads=threads)
    try:
        _check_memory(2 * runner.moment_bytes)
        sums, stacks = (runner.empty(), runner.empty()), runner.empty_stacks()
        for chunks, moments in zip(texts.halves, sums, strict=True):
            for tokens in chunks:
                runner.add(tokens, moments, stacks)
                on_chunk()
    finally:
        runner.close()
    found = [
        Matrix(name, _rows_and_cols(weights, name), seen, unseen)
        for seen, unseen in zip(*sums, strict=True)
        for name in seen.weights
    ]
    if EMBEDDING not in [matrix.name for matrix in found]:
        # Its rows are taken, not multiplied: every error of a row reaches the model as it is.
        shape = _rows_and_cols(weights, EMBEDDING)
        even = InputMoments((EMBEDDING,), 1, np.ones(shape[1]), np.eye(shape[1]))
        found.insert(0, Matrix(EMBEDDING, shape, even, even, is_multiplied=False))
    return found, stacks_of(stacks, weights)


def _check_memory(need_bytes: int) -> None:
    free_bytes = memory().available_bytes
    if need_bytes > free_bytes:
        raise MartletError(
            f"second moments of this model take {need_bytes} bytes, {free_bytes} are free; "
            "quantize by --type with an --imatrix instead"
        )


def _rows_and_cols(weights: WeightSource, name: str) -> tuple[int, int]:
    rows, cols = weights.shape(name) or (0, 0)
    return rows, cols


def estimate_errors(
    matrices: Sequence[Matrix],
    weights: WeightSource,
    on_matrix: Callable[[], None],
    threads: int | None = None,
) -> None:
    """Fills errors, shrinkage and gain of every matrix from a sample of its rows; all moments must
    be complete.

    Errors are judged on the half of the tokens that rounding did not see. The shrinkage of all
    layers is that of the role's middle layer; the gain is measured everywhere. The result does not
    depend on the number of threads.
    """
    by_role: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        by_role.setdefault(matrix.role, []).append(matrix)
    middles = [alike[len(alike) // 2] for alike in by_role.values()]
    by_input = [list(group) for _, group in groupby(matrices, key=lambda m: id(m.seen))]

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        best = pool.map(lambda m: _best_shrinkage(m, _sample(m, weights)), middles)
        shrinkages = dict(zip(by_role, best, strict=True))
        for group in pool.map(lambda g: _estimated(g, weights, shrinkages), by_input):
            for _ in group:
                on_matrix()


def _estimated(
    matrices: list[Matrix], weights: WeightSource, shrinkages: Mapping[str, float]
) -> list[Matrix]:
    """Fills what estimate_errors does, of matrices that read one input."""
    feedbacks: dict[float, Feedback] = {}
    unseen = matrices[0].unseen.mean_products()
    for matrix in matrices:
        values = _sample(matrix, weights)
        scale = matrix.shape[0] / len(values)
        importance = matrix.seen.squares.astype(np.float32)
        for name in formats_for(matrix.shape[1]):
            rounded = _decoded(encode(values, name, importance), name, values.shape)
            matrix.errors[name] = float(layer_error(values, rounded, unseen).sum()) * scale
        probe, shrinkage = _probe(matrix), shrinkages[matrix.role]
        if probe is not None and shrinkage < 1:
            if shrinkage not in feedbacks:
                feedbacks[shrinkage] = Feedback.of(matrix.seen.mean_products(), shrinkage)
            error = _error_with(values, probe, feedbacks[shrinkage], unseen) * scale
            matrix.gain = min(1.0, error / max(matrix.errors[probe], 1e-30))
            matrix.shrinkage = shrinkage if matrix.gain < 1 else 1.0
    return matrices


def measure_sensitivities(
    matrices: Sequence[Matrix | Stack],
    trial: Trial,
    on_matrix: Callable[[], None],
    threads: int | None = None,
) -> None:
    """Fills sensitivity: KL divergence over layer error of each matrix, coarsely rounded alone."""
    by_name = {matrix.name: matrix for matrix in matrices}
    errors: dict[str, float] = {}

    def coarse(name: str, values: np.ndarray) -> np.ndarray:
        rounded = _coarse(values)
        errors[name] = by_name[name].error(values, rounded)
        return rounded

    for name, divergence in trial.divergences(by_name.keys(), coarse, threads):
        by_name[name].sensitivity = divergence / errors[name] if errors[name] > 0 else 0.0
        on_matrix()


def count_lookups(matrices: Sequence[Matrix], trial: Trial) -> None:
    """Adds to the moments of an embedding that is the head as well what its lookups make of errors.

    A row that is looked up enters the model as it is, so its errors count alike in all columns: a
    multiple of the identity, as large as trials of both uses say.
    """
    tied = next((m for m in matrices if m.name == EMBEDDING and m.is_multiplied), None)
    if tied is None:
        return
    moments = tied.moment(), np.eye(tied.shape[1])
    errors: list[float] = []

    def coarse(_: str, values: np.ndarray) -> np.ndarray:
        rounded = _coarse(values)
        errors.extend(_priced_error(values, rounded, moment) for moment in moments)
        return rounded

    looked_up, computed = trial.divergences_of_tied(coarse)
    if min(*errors, computed) > 0:
        even = looked_up / errors[1] / (computed / errors[0])
        tied.seen, tied.unseen = (m.with_even(max(0.0, even)) for m in (tied.seen, tied.unseen))


def _priced_error(values: np.ndarray, rounded: np.ndarray, moment: np.ndarray) -> float:
    """The layer error, summed over rows; of many rows by a sample."""
    rows = len(values)
    n = min(rows, PRICED_ROWS)
    taken = np.arange(n) * rows // n
    return float(layer_error(values[taken], rounded[taken], moment).sum()) * rows / n


def final_blocks(
    matrix: Matrix,
    format_name: str,
    values: np.ndarray,
    feedback: Feedback | None,
    threads: int | None,
) -> np.ndarray:
    """The matrix in its format, uint8 (rows, row_bytes); without feedback where that is better."""
    if feedback is None or FORMATS[format_name].block == 1:
        importance = (matrix.seen.squares + matrix.unseen.squares).astype(np.float32)
        return encode(values, format_name, importance, threads=threads)
    return quantize_rows(values, format_name, feedback, threads=threads)


def _best_shrinkage(matrix: Matrix, values: np.ndarray) -> float:
    """The candidate with the least error on unseen tokens; 1 where none beats plain rounding."""
    probe = _probe(matrix)
    if probe is None:
        return 1.0
    seen, unseen = matrix.seen.mean_products(), matrix.unseen.mean_products()
    plain = _decoded(encode(values, probe, seen.diagonal().astype(np.float32)), probe, values.shape)
    errors = {1.0: float(layer_error(values, plain, unseen).sum())}
    for shrinkage in SHRINKAGES:
        errors[shrinkage] = _error_with(values, probe, Feedback.of(seen, shrinkage), unseen)
    return min(errors, key=lambda shrinkage: (errors[shrinkage], shrinkage))


def _probe(matrix: Matrix) -> str | None:
    return next((name for block, name in PROBE.items() if matrix.shape[1] % block == 0), None)


def _error_with(
    values: np.ndarray, format_name: str, feedback: Feedback, moment: np.ndarray
) -> float:
    data = quantize_rows(values, format_name, feedback)
    return float(layer_error(values, _decoded(data, format_name, values.shape), moment).sum())


def _decoded(data: np.ndarray, format_name: str, shape: tuple[int, ...]) -> np.ndarray:
    return dequantize(data.reshape(-1), FORMATS[format_name], shape)


def _sample(matrix: Matrix, weights: WeightSource) -> np.ndarray:
    """Rows spread evenly over the matrix, float32 (SAMPLE_ROWS at most, cols)."""
    rows = matrix.shape[0]
    n = min(rows, SAMPLE_ROWS)
    return weights.dequantized(matrix.name)[np.arange(n) * rows // n]


def _coarse(values: np.ndarray) -> np.ndarray:
    """Rounded to 15 levels per run of neighbours: about the noise of four bits."""
    cols = values.shape[-1]
    run = 32 if cols % 32 == 0 else cols
    runs = values.reshape(-1, cols // run, run)
    step = np.abs(runs).max(axis=2, keepdims=True) / np.float32(7)
    rounded = np.rint(np.divide(runs, step, out=np.zeros_like(runs), where=step > 0)) * step
    return rounded.reshape(values.shape)
