"""Whole texts through a plan with BLAS, from any op on and with other values for a weight.

Owns: trial runs, which ask what a change of one weight does to the hidden states. Must not know:
what is changed, why, or how the outcome is judged. Products are matrix products over all rows,
so a row's last bits depend on its company: nothing here serves requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import pairwise

import numpy as np

from .config import ModelConfig
from .executors.reference import ReferenceExecutor
from .executors.reference_math import soft_capped
from .executors.reference_run import Run
from .models import record_plan
from .ops import BufferKind, KvType, OpKind
from .plan import Op
from .step import Step
from .weights import WeightSource

_BLOCK_TOKENS = 32


class DenseRunner(ReferenceExecutor):
    """Runs of one fixed batch of sequences, each from position 0, with float activations.

    A run is begun, advanced op by op and branched; ops are those of `plan`.
    """

    name = "dense"

    def __init__(
        self, config: ModelConfig, weights: WeightSource, sequences: Sequence[Sequence[int]]
    ) -> None:
        lengths = [len(tokens) for tokens in sequences]
        n_rows = sum(lengths)
        plan = record_plan(config, weights, n_rows, activations=BufferKind.F32)
        width = -(-max(lengths) // _BLOCK_TOKENS)
        n_blocks = width * len(sequences)
        super().__init__(
            plan, weights, n_blocks=n_blocks, block_tokens=_BLOCK_TOKENS, kv_type=KvType.F32
        )
        self._ids = {tensor.name: at for at, tensor in enumerate(plan.tensors)}
        self._step = Step(
            tokens=np.concatenate([np.array(tokens, np.int32) for tokens in sequences]),
            positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
            seq_start=np.cumsum([0, *lengths], dtype=np.int32),
            block_table=np.arange(n_blocks, dtype=np.int32).reshape(len(sequences), width),
            out_rows=np.empty(0, np.int32),
            hidden_rows=np.arange(n_rows, dtype=np.int32),
        )

    def begin(self) -> Run:
        return Run(self.plan, self._step, self.block_tokens)

    def advance(self, run: Run, start: int, end: int | None = None) -> None:
        """Computes ops start … end - 1 of the plan; end left out: to the last."""
        for op in self.plan.ops[start:end]:
            self._run_op[op.kind](run, op)

    def branch(self, run: Run, at: int) -> Run:
        """The same rows, to go on from op `at` in another way; only what is read then is copied."""
        other, live = copy(run), self._read_from(at)
        other.buffers = [
            run.floats(b).copy() if b in live else np.empty_like(run.floats(b))
            for b in range(len(run.buffers))
        ]
        return other

    def _read_from(self, at: int) -> set[int]:
        """Buffers that ops from `at` on read before they write them whole."""
        live: set[int] = set()
        for op in reversed(self.plan.ops[at:]):
            is_part = op.kind is OpKind.HEAD_LINEAR or (
                op.kind is OpKind.LINEAR and op.int_of("out_col") > 0
            )
            if not op.accumulate and not is_part:
                live -= {op.out}
            live |= {b for b in op.inputs if b >= 0} | ({op.out} if op.accumulate else set())
        return live

    def value(self, name: str) -> np.ndarray:
        found = self._decoded[self._ids[name]]
        assert found is not None, f"{name} stays in the file"
        return found

    def changed(self, name: str, values: np.ndarray) -> DenseRunner:
        """A runner with other float32 values for a weight; all others are shared. Both may advance
        runs of their own at the same time."""
        other = copy(self)
        other._decoded = [*self._decoded]
        other._decoded[self._ids[name]] = values
        other._run_op = other._op_methods()
        return other

    def ops_with(self, name: str) -> list[int]:
        """Places in the plan of the ops that read this weight."""
        at = self._ids[name]
        return [i for i, op in enumerate(self.plan.ops) if at in op.weights]

    def _products(self, run: Run, op: Op, n_weights: int) -> np.ndarray:
        x = run.floats(op.inputs[0])
        parts = []
        for w_id, b_id in zip(op.weights[:n_weights], op.weights[n_weights:], strict=True):
            w, bias = self._tensor(w_id), self._tensor(b_id)
            if w is None:
                break
            part = x @ w.T
            parts.append(part if bias is None else part + bias)
        return np.concatenate(parts, axis=1)

    def _keep(self, run: Run, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Whole sequences attend to their own rows: no cache is read."""

    def _attention(self, run: Run, op: Op) -> None:
        q, k, v = run.split_qkv(op)
        window, scale = op.int_of("window"), np.float32(op.float_of("scale"))
        cap = op.float_of("cap")
        out = np.empty((len(q), q.shape[1] * v.shape[2]), np.float32)
        for start, end in pairwise(run.step.seq_start):
            rows = slice(start, end)
            out[rows] = _causal(q[rows], k[rows], v[rows], scale, cap, window)
        run.store(op, out)


def _causal(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32, cap: float, window: int
) -> np.ndarray:
    """Attention of a whole sequence over itself: q (n, heads, dim), k and v (n, kv_heads, dim)."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    hidden = (distance < 0) | (distance >= window if window else False)
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim)
    out = np.empty((n, kv_heads, heads // kv_heads, v.shape[2]), np.float32)
    for h in range(kv_heads):
        for g in range(heads // kv_heads):
            scores = soft_capped((grouped[:, h, g] @ k[:, h].T) * scale, cap)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h, g] = (weights @ v[:, h]) / weights.sum(axis=1, keepdims=True)
    return out.reshape(n, -1)
