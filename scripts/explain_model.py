"""What a model asks of a machine: work of steps, what binds them, what would change it.
Owns the calculations, all from the plan; must not know records, how anything is shown or drawn.

A step takes at least the longer of two times: its multiply-adds at the machine's speed, and its
bytes at that of memory. What binds is the longer one (the roofline model)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.mixtures import find_preset, mixture
from martlet.runtime.config import ModelConfig
from martlet.runtime.estimate import kv_lower_bytes
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.plan import Plan
from martlet.runtime.speculation import MOST
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredWeights, stored_name
from martlet.runtime.work import Speed, Work, kv_value_bytes, steps_work
from martlet.scripts.bench_cases import Case

MOST_SEQUENCES = 4096  # beyond it nothing is looked for
TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
ACCEPTANCES = (0.6, 0.8)


@dataclass(frozen=True)
class Bound:
    """A case with the least time that a machine's limits allow it."""

    case: Case
    work: Work
    speed: Speed

    @property
    def multiply_s(self) -> float:
        return self.speed.seconds(self.work)[0]

    @property
    def memory_s(self) -> float:
        return self.speed.seconds(self.work)[1]

    @property
    def seconds(self) -> float:
        return max(self.multiply_s, self.memory_s)

    @property
    def binds(self) -> str:
        return "multiply" if self.multiply_s > self.memory_s else "memory"

    @property
    def tokens_per_s(self) -> float:
        return self.case.tokens_in_all / self.seconds

    @property
    def intensity(self) -> float:
        """Multiply-adds per byte."""
        return self.work.macs / self.work.n_bytes


@dataclass(frozen=True)
class Subject:
    """A model on a machine, with the type of its cache."""

    plan: Plan
    kv_type: KvType
    speed: Speed

    def bound(self, case: Case) -> Bound:
        steps = steps_of(case, self.plan.max_rows)
        work = steps_work(self.plan, steps, kv_value_bytes(self.plan, self.kv_type))
        return Bound(case, work, self.speed)

    def decode(self, context: int, n_seqs: int = 1) -> Bound:
        """One step, whose rows see `context` positions each."""
        return self.bound(Case("decode", 1, context - 1, n_seqs))

    def check(self, context: int, n_rows: int) -> Bound:
        """One step of n_rows of one sequence, all of whose logits are read; as guesses are."""
        step = lay_out(1, n_rows, context - 1, n_rows)
        work = steps_work(self.plan, [step], kv_value_bytes(self.plan, self.kv_type))
        return Bound(Case("prefill", n_rows, context - 1), work, self.speed)

    def crossover(self, context: int) -> int | None:
        """The fewest sequences whose decode is bound by multiplying; None: that never happens.

        Bytes grow by a sequence's keys and values and, with experts, by ever fewer weights, so
        that once multiplying takes longer it stays so."""

        def multiplies(n: int) -> bool:
            return self.decode(context, n).binds == "multiply"

        least, most = 0, 1  # memory binds, multiplying does
        while not multiplies(most):
            if most >= MOST_SEQUENCES:
                return None
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if multiplies(middle) else (middle, most)
        return most


def lay_out(n_seqs: int, n_rows: int, first: int, n_out: int) -> Step:
    """n_rows of each sequence from position `first` on; the last n_out have logits."""
    ends = n_rows * np.arange(1, n_seqs + 1, dtype=np.int32)
    return Step(
        tokens=np.zeros(n_seqs * n_rows, np.int32),
        positions=np.tile(np.arange(first, first + n_rows, dtype=np.int32), n_seqs),
        seq_start=np.concatenate([np.zeros(1, np.int32), ends]),
        block_table=np.zeros((n_seqs, 0), np.int32),  # where keys and values lie costs nothing
        out_rows=np.concatenate([np.arange(e - n_out, e, dtype=np.int32) for e in ends]),
    )


def steps_of(case: Case, max_rows: int) -> Iterator[Step]:
    """Those of bench_cases, without an executor."""
    if case.kind == "decode":
        for at in range(case.n_tokens):
            yield lay_out(case.n_seqs, 1, case.depth + at, 1)
        return
    for start in range(0, case.n_tokens, max_rows):
        n_rows = min(max_rows, case.n_tokens - start)
        yield lay_out(1, n_rows, case.depth + start, int(start + n_rows == case.n_tokens))


# -- what a context takes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    n_tokens: int
    kv_bytes: int  # of one sequence, states included: what attention still sees
    decode: Bound
    crossover: int | None


def contexts(subject: Subject, longest: int) -> list[Context]:
    """Every doubling up to the longest."""
    lengths = sorted({1, longest, *(n for n in (1 << k for k in range(9, 24)) if n < longest)})
    plan = subject.plan
    return [
        Context(
            n,
            kv_lower_bytes(plan, n, subject.kv_type) + plan.state_bytes,
            subject.decode(n),
            subject.crossover(n),
        )
        for n in lengths
    ]


# -- what other weights would change -------------------------------------------------------------


class Retyped(StoredWeights):
    """A file's tensors as if `martlet quantize --type` had been there; only shapes are read."""

    def __init__(self, file: GGUFFile, formats: Mapping[str, str]) -> None:
        super().__init__(file.tensors)
        self._formats = formats

    def format_name(self, name: str) -> str:
        return self._formats.get(stored_name(name)) or super().format_name(name)


@dataclass(frozen=True)
class Variant:
    name: str
    weight_bytes: int  # read in a step of one row
    decode: Bound
    prefill: Bound
    crossover: int | None


def variant(name: str, subject: Subject, context: int, prefill: int) -> Variant:
    decode = subject.decode(context)
    return Variant(
        name,
        decode.work.weight_bytes,
        decode,
        subject.bound(Case("prefill", prefill)),
        subject.crossover(context),
    )


def variants(
    file: GGUFFile, subject: Subject, context: int, prefill: int, types: Sequence[str] = TYPES
) -> list[Variant]:
    """As it is; with its weights in other types; with keys and values in other ones."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes)
    found = [variant("as it is", subject, context, prefill)]
    for name in types:
        formats = mixture(find_preset(name), file.metadata, shapes)
        plan = record_plan(config, Retyped(file, formats), subject.plan.max_rows)
        other = Subject(plan, subject.kv_type, subject.speed)
        found.append(variant(name, other, context, prefill))
    for kv_type in (KvType.F16, KvType.Q8_0):
        if kv_type is not subject.kv_type and subject.plan.kv_layers:
            other = Subject(subject.plan, kv_type, subject.speed)
            found.append(
                variant(f"keys and values {kv_type.name.lower()}", other, context, prefill)
            )
    return found


# -- what guesses would change -------------------------------------------------------------------


@dataclass(frozen=True)
class Guess:
    """Checking n_guessed tokens with the one that is sure."""

    n_guessed: int
    cost: float  # of such a step, in steps of one row

    @property
    def break_even(self) -> float | None:
        """The least acceptance of each token with which it pays; None: none does."""
        if expected_tokens(1.0, self.n_guessed) <= self.cost:
            return None
        least, most = 0.0, 1.0
        for _ in range(40):
            middle = (least + most) / 2
            enough = expected_tokens(middle, self.n_guessed) >= self.cost
            least, most = (least, middle) if enough else (middle, most)
        return most

    def gain(self, acceptance: float) -> float:
        return expected_tokens(acceptance, self.n_guessed) / self.cost


def expected_tokens(acceptance: float, n_guessed: int) -> float:
    """1 + a + … + a^g: the sure token, and each guess if all before it were right."""
    return sum(acceptance**k for k in range(n_guessed + 1))


def guesses(subject: Subject, context: int, most: int = MOST) -> list[Guess]:
    alone = subject.decode(context).seconds
    return [Guess(g, subject.check(context, 1 + g).seconds / alone) for g in range(1, most + 1)]


def facts_of(file: GGUFFile, plan: Plan) -> dict[str, Any]:
    return {
        "file": file.path.name,
        "file_bytes": file.n_bytes,
        "weights": sum(tensor.n_weights for tensor in file.tensors.values()),
        "kv_bytes_per_token": plan.kv_bytes_per_token(),
        "state_bytes": plan.state_bytes,
        "windows": sorted({w for w in plan.kv_windows() if w}),
    }
