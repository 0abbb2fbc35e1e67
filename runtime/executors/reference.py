"""The meaning of every op, in NumPy: slow and obvious. Other executors are compared with this.

Must not know models, scheduler or files. Weights are float32 arrays, decoded at load. A row
is always computed by itself, so its result cannot depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..errors import ModelError
from ..ops import EmbedBy, KvType, OpKind, RopeStyle, RowKind
from ..plan import Op, Plan, PlanTensor
from ..step import MOST_GUESSES, Step, check_adapters, check_given
from ..weights import WeightSource, decoded_rows, finite_values
from .reference_experts import expert_glu, expert_sum, router
from .reference_math import (
    activated,
    attend,
    gated,
    rms_norm,
    rotate,
    round_q8_0,
    sigmoid,
    soft_capped,
)
from .reference_run import Run
from .reference_state import conv, delta, scan

_EMBED_BY: dict[EmbedBy, Callable[[Step], np.ndarray]] = {
    EmbedBy.TOKEN: lambda step: step.tokens,
    EmbedBy.POSITION: lambda step: step.positions,
    EmbedBy.SEGMENT: lambda step: step.segments,
}
_KV_DTYPES = {KvType.F16: np.float16, KvType.F32: np.float32, KvType.Q8_0: np.float32}


def _decoded(weights: WeightSource, tensor: PlanTensor) -> np.ndarray | None:
    if tensor.values is not None or tensor.stays:
        return tensor.values
    return finite_values(weights, tensor.name).reshape(tensor.shape)


class ReferenceExecutor:
    name = "reference"

    def __init__(
        self,
        plan: Plan,
        weights: WeightSource,
        *,
        block_tokens: int = 32,
        n_blocks: int,
        kv_type: KvType = KvType.F16,
        n_window_blocks: int | None = None,
        n_states: int = 1,
        n_guesses: int = MOST_GUESSES,
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.max_rows = plan.max_rows
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self.n_window_blocks = n_window_blocks or n_blocks
        self.window = plan.window
        self.sees_ahead = plan.sees_ahead
        self.hidden = np.empty((0, plan.hidden_width), np.float32)
        self._last: Run | None = None
        self._decoded = [_decoded(weights, tensor) for tensor in plan.tensors]
        self.kv_type = kv_type
        dtype = _KV_DTYPES[kv_type]
        self._is_windowed = [window > 0 for window in plan.kv_windows()]
        n_slots = [
            (self.n_window_blocks if is_windowed else n_blocks) * block_tokens
            for is_windowed in self._is_windowed
        ]
        layers = list(zip(n_slots, plan.kv_layers, strict=True))
        self._keys = [np.zeros((n, k.kv_heads, k.head_dim), dtype) for n, k in layers]
        self._values = [
            keys[:, :, : k.value_dim]  # the same memory
            if k.is_latent
            else np.zeros((n, k.kv_heads, k.value_dim), dtype)
            for keys, (n, k) in zip(self._keys, layers, strict=True)
        ]
        self.n_states, self.n_guesses = n_states if plan.states else 0, n_guesses
        self.states = [np.zeros((self.n_states, width), np.float32) for width in plan.states]
        self.guesses = [np.zeros((self.n_states, n_guesses, n), np.float32) for n in plan.inputs]
        self._run_op = self._op_methods()

    def _op_methods(self) -> dict[OpKind, Callable[[Run, Op], None]]:
        return {
            OpKind.EMBED: self._embed,
            OpKind.NORM: self._norm,
            OpKind.QUANTIZE: self._quantize,
            OpKind.LINEAR: self._linear,
            OpKind.ROPE_TABLE: self._rope_table,
            OpKind.ROPE_KV: self._rope_kv,
            OpKind.ATTENTION: self._attention,
            OpKind.GLU: self._glu,
            OpKind.ADD: self._add,
            OpKind.TAKE_ROWS: self._take_rows,
            OpKind.COPY: self._copy,
            OpKind.LINEAR_GLU: self._linear_glu,
            OpKind.HEAD_LINEAR: self._head_linear,
            OpKind.SCALE: self._scale,
            OpKind.GATE: self._gate,
            OpKind.CONV: partial(conv, self),
            OpKind.DELTA: partial(delta, self),
            OpKind.SCAN: partial(scan, self),
            OpKind.ROUTER: partial(router, self),
            OpKind.EXPERT_GLU: partial(expert_glu, self),
            OpKind.EXPERT_SUM: partial(expert_sum, self),
            OpKind.ADAPT: self._adapt,
        }

    def run(self, step: Step) -> np.ndarray:
        if len(step.tokens) > self.max_rows:
            raise ModelError(f"a step of {len(step.tokens)} rows, at most {self.max_rows}")
        check_adapters(step, self.plan.n_adapters)
        check_given(step, self.plan.given_width)
        run = Run(self.plan, step, self.block_tokens)
        for op in self.plan.ops:
            self._run_op[op.kind](run, op)
        self.hidden = run.hidden()
        self._last = run
        return run.logits()

    def read_rows(self, buffer: int, n_rows: int) -> np.ndarray:
        """Rows of a float buffer after a step, (n_rows, width) float32; buffers share nothing."""
        if self._last is None:
            raise ModelError("there are no rows to read before the first step")
        return self._last.floats(buffer)[:n_rows].copy()

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        n = self.block_tokens
        for pools in (self._keys, self._values):
            for pool, is_windowed in zip(pools, self._is_windowed, strict=True):
                a, b = window if window and is_windowed else (src, dst)
                pool[b * n : (b + 1) * n] = pool[a * n : (a + 1) * n]

    def copy_state(self, src: int, dst: int) -> None:
        for states in self.states:
            states[dst] = states[src]

    def close(self) -> None:
        self._decoded.clear()

    def weight(self, op: Op, name: str) -> np.ndarray | None:
        """The op's weight as float32 (float64 for tables), None where it has none."""
        return self._tensor(op.weight_of(name))

    def _tensor(self, at: int) -> np.ndarray | None:
        return self._decoded[at] if at >= 0 else None

    # -- ops --------------------------------------------------------------------------------

    def _embed(self, run: Run, op: Op) -> None:
        by = _EMBED_BY[EmbedBy(op.int_of("by"))](run.step)
        tensor = self.plan.tensors[op.weight_of("table")]
        table = self.weight(op, "table")
        rows = decoded_rows(self.weights, tensor.name, by) if table is None else table[by]
        run.store(op, np.float32(op.float_of("scale")) * rows)

    def _norm(self, run: Run, op: Op) -> None:
        x = run.floats(op.inputs[0])
        weight, bias = self.weight(op, "weight"), self.weight(op, "bias")
        group, eps, centered = op.int_of("group"), op.float_of("eps"), bool(op.int_of("centered"))
        run.store(op, rms_norm(x, weight, group, eps, bias=bias, centered=centered))

    def _quantize(self, run: Run, op: Op) -> None:
        run.store(op, run.floats(op.inputs[0]))

    def _linear(self, run: Run, op: Op) -> None:
        run.store(op, self._products(run, op, 3), first_col=op.int_of("out_col"))

    def _linear_glu(self, run: Run, op: Op) -> None:
        products, activation = self._products(run, op, 2), op.int_of("activation")
        if op.weight_of("up") < 0:
            run.store(op, activated(activation, products))
            return
        gate, up = np.split(products, 2, axis=1)
        run.store(op, gated(activation, gate, up))

    def _products(self, run: Run, op: Op, n_weights: int) -> np.ndarray:
        """x @ w.T + b of the op's stacked weights, (n, sum of their rows)."""
        x = run.planes(op)
        parts = []
        for w_id, b_id in zip(op.weights[:n_weights], op.weights[n_weights:], strict=True):
            w, bias = self._tensor(w_id), self._tensor(b_id)
            if w is None:
                break
            # Row by row: a matrix product may sum in another order for another number of rows.
            part = np.empty((len(x), len(w)), np.float32)
            for row in range(len(x)):
                part[row] = w @ x[row]
            parts.append(part if bias is None else part + bias)
        return np.concatenate(parts, axis=1)

    def _head_linear(self, run: Run, op: Op) -> None:
        x, w, heads = run.planes(op), self.weight(op, "weight"), op.int_of("heads")
        assert w is not None
        n, (_, rows, cols) = len(x), w.shape
        x = x.reshape(n, heads, -1)
        out = np.empty((n, heads, rows + x.shape[2] - cols), np.float32)
        for row in range(n):
            for h in range(heads):
                out[row, h, :rows] = w[h] @ x[row, h, :cols]
        if op.inputs[2] >= 0:
            out[:, :, rows:] = run.floats(op.inputs[2]).reshape(x.shape)[:, :, cols:]
        run.store(op, out.reshape(n, -1))

    def _adapt(self, run: Run, op: Op) -> None:
        x, low = run.floats(op.inputs[0]), run.floats(op.inputs[1])
        a, b = self.weight(op, "a"), self.weight(op, "b")
        assert a is not None
        assert b is not None
        shares = run.step.adapters[run.seq_of(op.out), op.int_of("adapter")]
        out = run.floats(op.out)[:, op.int_of("out_col") :][:, : len(b)]
        for row in np.flatnonzero(shares):
            low[row] = np.float32(op.float_of("scale")) * shares[row] * (a @ x[row])
            out[row] += b @ low[row]

    def _rope_table(self, run: Run, op: Op) -> None:
        inv_freq = self.weight(op, "inv_freq")
        assert inv_freq is not None
        angles = run.step.positions[:, None].astype(np.float64) * inv_freq
        trig = np.stack((np.cos(angles), np.sin(angles)), axis=2) * op.float_of("factor")
        run.store(op, trig.reshape(len(angles), -1).astype(np.float32))

    def _rope_kv(self, run: Run, op: Op) -> None:
        q, k, v = run.split_qkv(op)
        writes = k.size > 0
        norm_after = op.int_of("norm_after")
        if not norm_after:
            q, k = self._norm_heads(run, op, q, k)
        if op.inputs[1] >= 0:
            trig, style = run.floats(op.inputs[1]), RopeStyle(op.int_of("style"))
            first = op.int_of("value_dim") if run.is_latent(op) else 0
            q, k = rotate(q, trig, style, first), rotate(k, trig, style, first)
        if norm_after:
            q, k = self._norm_heads(run, op, q, k)
        if span := op.int_of("temperature_span"):
            grown = np.log(1 + run.step.positions // span)
            factor = (1 + np.float32(op.float_of("temperature")) * grown).astype(np.float32)
            q = q * factor[:, None, None]
        if op.int_of("v_norm"):
            v = rms_norm(v.reshape(len(v), -1), None, v.shape[2], op.float_of("eps")).reshape(
                v.shape
            )
        if writes:
            self._keep(run, op.int_of("kv_layer"), *map(self._round_kv, (k, v)))
        n, parts = len(q), (q, k) if run.is_latent(op) else (q, k, v)
        run.store(op, np.concatenate([part.reshape(n, -1) for part in parts], axis=1))

    def _norm_heads(
        self, run: Run, op: Op, q: np.ndarray, k: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Over as many values as the weights have: one head, or all of them; of a latent key, its
        values."""
        q_norm, k_norm = self.weight(op, "q_norm"), self.weight(op, "k_norm")
        n_normed = op.int_of("value_dim" if run.is_latent(op) else "head_dim")
        normed, turned = k[:, :, :n_normed], k[:, :, n_normed:]
        q, k = (
            x
            if w is None
            else rms_norm(x.reshape(len(x), -1), w, len(w), op.float_of("eps")).reshape(x.shape)
            for x, w in ((q, q_norm), (normed, k_norm))
        )
        return q, np.concatenate((k, turned), axis=2)

    def _keep(self, run: Run, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        slots = run.slots_of(run.row_seq, run.step.positions, self._is_windowed[layer])
        self._keys[layer][slots] = k
        if not self.plan.kv_layers[layer].is_latent:
            self._values[layer][slots] = v

    def _round_kv(self, x: np.ndarray) -> np.ndarray:
        """Heads as the cache will hold them. Half precision saturates instead of overflowing."""
        if self.kv_type is KvType.Q8_0:
            return round_q8_0(x)
        return np.clip(x, -65504, 65504) if self.kv_type is KvType.F16 else x

    def _attention(self, run: Run, op: Op) -> None:
        q, _, _ = run.split_qkv(op)
        layer, window = op.int_of("kv_layer"), op.int_of("window")
        scale, cap, sinks = op.float_of("scale"), op.float_of("cap"), self.weight(op, "sinks")
        out = []
        for row, position in enumerate(run.step.positions):
            first = max(0, position - window + 1) if window else 0
            end = position + 1
            if op.int_of("both_ways"):
                length = run.lengths[row]
                end = min(length, position + window) if window else length
            seen = np.arange(first, end)
            slots = run.slots_of(run.row_seq[row], seen, self._is_windowed[layer])
            k = self._keys[layer][slots].astype(np.float32)
            v = self._values[layer][slots].astype(np.float32)
            out.append(attend(q[row], k, v, scale, cap, sinks).reshape(-1))
        run.store(op, np.array(out, np.float32))

    def _glu(self, run: Run, op: Op) -> None:
        gate = run.floats(op.inputs[0])
        up = np.ones_like(gate)
        if not op.int_of("alone"):
            gate, up = np.split(gate, 2, axis=1)
        run.store(op, gated(op.int_of("activation"), gate, up))

    def _gate(self, run: Run, op: Op) -> None:
        x, gate = run.floats(op.inputs[0]), run.floats(op.inputs[1])
        c = np.arange(self.plan.buffers[op.out].width)
        group, stride = op.int_of("group"), op.int_of("gate_stride")
        gate = gate[:, op.int_of("gate_col") + c // group * stride + c % group]
        run.store(op, activated(op.int_of("activation"), gate) * x[:, op.int_of("x_col") + c])

    def _add(self, run: Run, op: Op) -> None:
        x, gate = run.floats(op.inputs[0]), self.weight(op, "gate")
        if gate is not None:
            by = run.floats(op.inputs[1])
            x = x * sigmoid((by * gate).sum(axis=1, keepdims=True))
        run.store(op, x)

    def _scale(self, run: Run, op: Op) -> None:
        scaled = np.float32(op.float_of("scale")) * run.floats(op.inputs[0])
        run.store(op, soft_capped(scaled, op.float_of("cap")))

    def _take_rows(self, run: Run, op: Op) -> None:
        is_hidden = self.plan.buffers[op.out].rows is RowKind.HIDDEN
        taken = run.step.hidden_rows if is_hidden else run.step.out_rows
        run.store(op, run.floats(op.inputs[0])[taken])

    def _copy(self, run: Run, op: Op) -> None:
        x = run.step.given if op.inputs[0] < 0 else run.floats(op.inputs[0])
        run.store(op, x, op.int_of("out_col"))
