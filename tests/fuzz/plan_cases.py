"""The sound plans and steps that plan.c spoils: small ones of op_cases.py, of every op.

python -m tests.fuzz.plan_cases FOLDER
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from martlet.runtime.executors import native
from martlet.runtime.ops import BufferKind
from martlet.runtime.plan import Plan
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredWeights

from ..runtime.op_cases import OP_CASES, OpBuilder, OpCase
from ..runtime.record_cases import ScalarExecutor, recorded
from ..runtime.tiny import Chunk, make_step

MOST_BYTES = 100 << 10  # a case is copied for each input
REMEMBER = ("attention", "rope_kv", "conv", "delta", "scan")
MOST_ROWS = 9  # of a step, where a case has steps so small
NAMES = (
    "embed-F32", "embed-by-POSITION", "embed-by-SEGMENT", "embed-from-file-F16",
    "norm-33-by0-w33-add1", "norm-96-by48-w96-add0", "layer_norm-33-by0-b33", "norm-quantized",
    "scale-1.0-cap30.0", "quantize-32", "linear-odd-F16-bias1-add1", "linear-three-bias1-add1",
    "linear-Q4_0-1x64-1rows", "linear-Q5_1-33x64-3rows", "linear-IQ4_NL-1x64-1rows-bf16",
    "linear-MXFP4-1x64-1rows", "adapt-F16", "glu-SILU-6", "activate-GELU_TANH",
    "glu-CLAMPED-quantized", "layer_norm-quantized", "linear_glu-Q4_1-Q4_1-33-1rows-bias1",
    "linear_glu-F32-F16-33-1rows-bias0", "linear_alone-F16-33-1rows-bias1", "router-softmax",
    "router-groups", "router-shares", "experts-one-of-one-1rows", "experts-fused-1rows",
    "experts-bias-clamped-1rows", "experts-add-1rows", "add", "add_gated", "given-5", "take_rows",
    "take_no_rows", "head_linear-F32-3x32x9-5-1rows", "head_linear-Q8_0-3x96x64-32-1rows",
    "attention-gqa-half", "attention-partial-pair", "attention-value-dim", "attention-window",
    "attention-sinks-window", "attention-soft-cap", "attention-both-ways", "attention-v-norm",
    "attention-latent", "attention-latent-window", "attention-temperature",
    "attention-norm-after-rope", "rope_kv-gqa-pair", "experts-precise-1rows",
    "gate-SIGMOID-columns", "gate-quantized", "conv-40x4-SILU", "conv-33x3-IDENTITY",
    "delta-2-2-8-grouped0", "delta-2-6-16-grouped0", "scan-2-8-1-16", "scan-6-24-2-10",
)  # fmt: skip


class SmallCase(OpCase):
    """The same op, whose result four rows of weights take: no identity as wide as it is."""

    def build(self) -> tuple[Plan, StoredWeights]:
        b = OpBuilder(np.random.default_rng(0), self.activations)
        shown = self.op(b, b.plan.embed(b.new("table", "F32", 23, self.width)))
        b.plan.activations = BufferKind.Q8
        rows = b.plan.take_rows(shown)
        head = b.new("head", "F16", 4, b.plan.buffers[rows].width)
        b.plan.linear(rows, [head], name="logits", logits=True)
        return b.plan.finish(), b.weights


def short(case: OpCase) -> Sequence[Step]:
    """Its own steps while they are small. Those that remember get two sequences of few rows."""
    small = list(itertools.takewhile(lambda step: step.n_rows <= MOST_ROWS, case.steps))
    if small or not case.name.startswith(REMEMBER):
        return small or case.steps[:1]
    first = make_step([Chunk([1, 2, 3, 4, 5], 0, [3, 1]), Chunk([6, 7], 0, [0, 2])], [1, 6])
    return [first, make_step([Chunk([8], 5, [3, 1]), Chunk([9], 2, [0, 2])])]


def record(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    cases = {case.name: SmallCase(**{**vars(case), "steps": short(case)}) for case in OP_CASES}
    version = native.Library().lib.mt_abi_version()
    paths = []
    for i, name in enumerate(NAMES):
        path = folder / f"{i:03}-{name}.case"
        recorded(partial(cases[name].run, ScalarExecutor)).write(path, version)
        if path.stat().st_size > MOST_BYTES:
            print(name, path.stat().st_size)
        paths.append(path)
    return paths


if __name__ == "__main__":
    print(f"{len(record(Path(sys.argv[1])))} cases in {sys.argv[1]}")
