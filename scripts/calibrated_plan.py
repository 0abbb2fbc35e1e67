"""Plans of calibrated files: formats under a budget or by a preset, and rounding with feedback.
Owns budgets as people write them, and the step from estimates to a quant.quantize.Plan; must not
know how estimates come about."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from martlet.quant.allocate import BudgetTooSmall, Choice, allocate
from martlet.quant.errors import FileFormatError
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gptq import Feedback
from martlet.quant.mixtures import PRESETS, choices, find_preset, mixture
from martlet.quant.quantize import Plan, quantized_bytes
from martlet.runtime.config import ModelConfig
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.weights import StoredWeights
from martlet.scripts import calibrated, options
from martlet.scripts.calibrated import Matrix, Texts
from martlet.scripts.calibrated_stacks import Stack, estimate_stack_errors
from martlet.scripts.scored_text import chunks_of
from martlet.scripts.trial import Trial

_RECIPE = "martlet.quantize.recipe"
_KEPT_FEEDBACKS = 4  # a layer has four inputs; its matrices follow each other in any order
_PADDING = 32  # the most that alignment adds to a tensor


@dataclass(frozen=True)
class Budget:
    """A size of the whole file, as `4.2M` or `95%-of Q4_K_M`, or bits per weight of its tensors."""

    n_bytes: int | None = None
    preset: str | None = None
    share: float = 1.0
    bits_per_weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)%-of )?([A-Za-z]\w+)", text.strip())
        if match is None:
            return cls(n_bytes=options.parse_bytes(text))
        share = float(match[1]) / 100 if match[1] else 1.0
        return cls(preset=find_preset(match[2]).name, share=share)

    def of(self, file: GGUFFile) -> int:
        """Bytes of the whole file."""
        if self.n_bytes is not None:
            return self.n_bytes
        if self.preset is not None:
            preset = PRESETS[self.preset]
            formats = mixture(preset, file.metadata, _shapes(file), has_imatrix=True)
            return int(self.share * quantized_bytes(file, Plan(formats, preset.file_type)))
        assert self.bits_per_weight is not None, "one of the three is given"
        n_weights = sum(tensor.n_weights for tensor in file.tensors.values())
        copied = Plan({}, 0)
        stored = sum(len(tensor.data) for tensor in file.tensors.values())
        return quantized_bytes(file, copied) - stored + int(self.bits_per_weight * n_weights / 8)


@dataclass(frozen=True)
class Text:
    """The calibration text, and how much of it is used in chunks of how many tokens."""

    content: str
    context: int
    tokens: int


Progress = Callable[[str, int, int], None]  # what is done, how many of how many


@dataclass(frozen=True)
class Observed:
    """All that a text says of a file's matrices, whatever becomes of them."""

    matrices: Sequence[Matrix]
    stacks: Sequence[Stack]
    recipe: Mapping[str, str | int]  # what was read, for the metadata

    @property
    def all(self) -> list[Matrix | Stack]:
        return [*self.matrices, *self.stacks]


def observed(
    file: GGUFFile,
    text: Text,
    *,
    with_prices: bool,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Observed:
    """with_prices: sensitivities are measured, which formats under a budget are chosen by."""
    weights = StoredWeights(file.tensors)
    config = ModelConfig.from_metadata(file.metadata, _shapes(file))
    tokenizer = Tokenizer.from_metadata(file.metadata)
    chunks = chunks_of(text.content, tokenizer, text.context, None)
    texts = Texts.split(chunks, text.tokens, calibrated.trial_tokens(_shapes(file)))

    def counter(what: str, total: int) -> Callable[[], None]:
        done = 0

        def one_more() -> None:
            nonlocal done
            done += 1
            progress(what, done, total)

        return one_more

    n_chunks = sum(map(len, texts.halves))
    on_chunk = counter("reading the text", n_chunks)
    matrices, stacks = calibrated.observe(
        config, weights, texts, threads=threads, on_chunk=on_chunk
    )
    trial = Trial(config, weights, texts.trial)
    calibrated.count_lookups(matrices, trial)
    if with_prices:
        both: list[Matrix | Stack] = [*matrices, *stacks]
        calibrated.measure_sensitivities(both, trial, counter("sensitivities", len(both)), threads)
    del trial
    on_matrix = counter("errors of formats", len(matrices))
    calibrated.estimate_errors(matrices, weights, on_matrix, threads)
    estimate_stack_errors(stacks, weights, calibrated.formats_for)
    recipe: dict[str, str | int] = {
        "text_sha256": hashlib.sha256(text.content.encode()).hexdigest(),
        "context": text.context,
        "tokens": n_chunks * text.context,
    }
    found = Observed(matrices, stacks, recipe)
    for each in found.all:  # what is copied loses nothing
        stored = file.tensors[each.name].format
        if stored.block > 1 or stored.name in each.errors:
            each.errors[stored.name] = 0.0
    return found


def calibrated_plan(
    file: GGUFFile,
    seen: Observed,
    budget: Budget | None,
    preset: str | None = None,
    *,
    threads: int | None = None,
) -> Plan:
    """Formats by the budget, or where there is none by the preset; all rounded on the text."""
    recipe = {**seen.recipe, "allocated": budget is not None}
    fields = {_RECIPE: Field.string(json.dumps(recipe))}
    if budget is None:
        known = find_preset(preset or "")
        chosen = choices(known, file.metadata, _shapes(file), has_imatrix=True)
        plan = Plan.of(chosen, known.file_type, fields=fields)
    else:
        plan = Plan(allocated(file, seen.all, budget.of(file), fields), 0, fields=fields)
        plan = replace(plan, file_type=nearest_file_type(file, plan.formats))
    changed = {
        name: format_name
        for name, format_name in plan.formats.items()
        if file.tensors[name].format.name != format_name
    }
    importance = {stack.name: stack.importance for stack in seen.stacks}
    return replace(plan, encoders=encoders(seen.matrices, changed, threads), importance=importance)


def unread(file: GGUFFile, seen: Observed) -> list[str]:
    """Tensors that presets quantize and of which the text says nothing: no product reads them."""
    known = {each.name for each in seen.all}
    quantized = mixture(PRESETS["Q8_0"], file.metadata, _shapes(file), has_imatrix=True)
    return [name for name in quantized if name not in known]


def allocated(
    file: GGUFFile, matrices: Sequence[Matrix | Stack], n_bytes: int, fields: Mapping[str, Field]
) -> dict[str, str]:
    """The format of each matrix, so that the whole file has n_bytes at most."""
    choices = {
        m.name: [replace(c, n_bytes=-(-c.n_bytes // _PADDING) * _PADDING) for c in m.choices()]
        for m in matrices
    }
    least = {name: min(each, key=lambda c: c.n_bytes) for name, each in choices.items()}
    formats = {name: choice.format for name, choice in least.items()}
    smallest = quantized_bytes(file, Plan(formats, 0, fields=fields))
    budget = n_bytes - smallest + sum(choice.n_bytes for choice in least.values())
    try:
        chosen: dict[str, Choice] = allocate(choices, budget)
    except BudgetTooSmall:
        raise BudgetTooSmall(
            f"a file of {n_bytes} bytes is asked for, {smallest} is the least that the formats for "
            "these rows allow; ask for more"
        ) from None
    return {name: choice.format for name, choice in chosen.items()}


def nearest_file_type(file: GGUFFile, formats: Mapping[str, str]) -> int:
    """general.file_type of the preset whose body is what most weights of the new file have."""
    counts: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        counts[formats.get(name, tensor.format.name)] += tensor.n_weights
    if not counts:
        raise FileFormatError(f"{file.path}: holds no tensors, so there is nothing to quantize")
    of_body = {preset.body: preset.file_type for preset in PRESETS.values()}
    return of_body[counts.most_common(1)[0][0]]


def encoders(
    matrices: Sequence[Matrix], formats: Mapping[str, str], threads: int | None
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What rounds each matrix; what several need of one input is computed once."""
    kept: OrderedDict[tuple[int, float], Feedback] = OrderedDict()

    def feedback_of(matrix: Matrix) -> Feedback | None:
        if matrix.shrinkage >= 1:
            return None
        # Roles that read one input may have shrinkages of their own.
        key = id(matrix.seen), matrix.shrinkage
        if key not in kept:
            kept[key] = Feedback.of(matrix.moment(), matrix.shrinkage)
            if len(kept) > _KEPT_FEEDBACKS:
                kept.popitem(last=False)
        return kept[key]

    def encode_matrix(matrix: Matrix, values: np.ndarray) -> np.ndarray:
        name = formats[matrix.name]
        return calibrated.final_blocks(matrix, name, values, feedback_of(matrix), threads)

    return {m.name: partial(encode_matrix, m) for m in matrices if m.name in formats}


def _shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in file.tensors.items()}
