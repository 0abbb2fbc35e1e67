"""The meaning of every op, in NumPy: slow and obvious. Other executors are compared with this.

Must not know models, scheduler or files. Weights are float32 arrays, decoded at load. A row
is always computed by itself, so its result cannot depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ModelError
from ..ops import Q8_BLOCK, Activation, BufferKind, Gating, KvType, OpKind, RopeStyle, RowKind
from ..plan import Op, Plan
from ..step import Step
from ..weights import WeightSource, finite_values

_KV_DTYPES = {KvType.F16: np.float16, KvType.F32: np.float32, KvType.Q8_0: np.float32}


@dataclass
class Q8Rows:
    """Quantized activations: value = q * d of its block of 32."""

    q: np.ndarray  # (n, width) int8
    d: np.ndarray  # (n, width / 32) float32

    def floats(self) -> np.ndarray:
        return self.q.astype(np.float32) * np.repeat(self.d, Q8_BLOCK, axis=1)


class Pairs(NamedTuple):
    """Rows and experts they have chosen, sorted by expert, then by row; each (n_pairs)."""

    rows: np.ndarray
    experts: np.ndarray
    weights: np.ndarray


def quantize_q8(x: np.ndarray) -> Q8Rows:
    """Blocks of 32 with d = max|x| / 127; a block of zeros has d = 0."""
    n, width = x.shape
    blocks = x.reshape(n, width // Q8_BLOCK, Q8_BLOCK)
    amax = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / amax
        # Where the inverse overflows, the block is zero for any purpose.
        is_zero = np.isinf(inverse)
        inverse[is_zero] = 0
        d = np.where(is_zero, np.float32(0), amax / np.float32(127))
        q = np.rint(blocks * inverse[:, :, None]).astype(np.int8)
    return Q8Rows(q.reshape(n, width), d)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest float32 whose lower 16 bits are 0, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    kept = np.where(np.isnan(x), bits | np.uint32(0x400000), nearest)
    return (kept & np.uint32(0xFFFF0000)).view(np.float32)


def round_q8_0(x: np.ndarray) -> np.ndarray:
    """Heads (n, heads, dim) as a Q8_0 cache holds them: per 32 values d = float16(max|x| / 127),
    q = round_half_even(x / d), value q * d."""
    n, heads, dim = x.shape
    padded = np.zeros((n, heads, -(-dim // Q8_BLOCK), Q8_BLOCK), np.float32)
    padded.reshape(n, heads, -1)[:, :, :dim] = x
    amax = np.abs(padded).max(axis=3, keepdims=True)
    d = np.minimum(amax / np.float32(127), np.float32(65504)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
        q = np.clip(np.rint(padded * inverse), -127, 127)
    return (q * d).reshape(n, heads, -1)[:, :, :dim]


def rms_norm(
    x: np.ndarray,
    weight: np.ndarray | None,
    group: int,
    eps: float,
    *,
    bias: np.ndarray | None = None,
    centered: bool = False,
) -> np.ndarray:
    """Per group of values of the last axis, without their mean where centered; weight and bias are
    as long as one group or the whole row."""
    groups = x.reshape(len(x), x.shape[1] // group, group)  # -1 fails without rows
    if centered:
        groups = groups - np.mean(groups, axis=2, keepdims=True, dtype=np.float32)
    mean_square = np.mean(groups * groups, axis=2, keepdims=True, dtype=np.float32)
    normed = groups / np.sqrt(mean_square + np.float32(eps))
    if weight is not None:
        normed = normed * weight.reshape(-1, group)
    if bias is not None:
        normed = normed + bias.reshape(-1, group)
    return normed.reshape(x.shape)


def rotate(heads: np.ndarray, trig: np.ndarray, style: RopeStyle) -> np.ndarray:
    """Turns the first n_rot dims of heads (n, n_heads, head_dim) by trig (n, n_rot)."""
    n_rot = trig.shape[1]
    cos, sin = trig[:, None, 0::2], trig[:, None, 1::2]
    if style is RopeStyle.PAIR:
        first, second = slice(0, n_rot, 2), slice(1, n_rot, 2)
    else:
        first, second = slice(0, n_rot // 2), slice(n_rot // 2, n_rot)
    a, b = heads[:, :, first], heads[:, :, second]
    turned = heads.copy()
    turned[:, :, first] = a * cos - b * sin
    turned[:, :, second] = a * sin + b * cos
    return turned


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return x / (np.float32(1) + np.exp(-x))


def clamped_glu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gpt-oss: gate and up are cut off at 7, the gate is that of quick gelu, and up is one more."""
    gate = np.minimum(gate, np.float32(7))
    up = np.clip(up, np.float32(-7), np.float32(7))
    return gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1))


def softmax(x: np.ndarray) -> np.ndarray:
    """Of each row."""
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def best_groups(scores: np.ndarray, groups: int, used: int) -> np.ndarray:
    """Scores of the groups with the best pairs; -inf in all others."""
    grouped = scores.reshape(len(scores), groups, -1)
    worth = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-worth, axis=1, kind="stable")[:, :used]
    kept = np.full_like(grouped, -np.inf)
    rows = np.arange(len(scores))[:, None]
    kept[rows, best] = grouped[rows, best]
    return kept.reshape(scores.shape)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)


def convolve(rows: np.ndarray, kernel: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """rows (taps - 1 + n, channels), kernel (channels, taps): the last n of causal sums."""
    taps = kernel.shape[1]
    n = len(rows) - taps + 1
    total = np.zeros((n, rows.shape[1]), np.float32) + (0 if bias is None else bias)
    for j in range(taps):
        total = total + kernel[:, j] * rows[j : j + n]
    return total.astype(np.float32)


def soft_capped(x: np.ndarray, cap: float) -> np.ndarray:
    """cap * tanh(x / cap); cap 0: x."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, cap: float = 0.0
) -> np.ndarray:
    """One row's heads (heads, head_dim) over gathered k, v (n_keys, kv_heads, dim)."""
    kv_heads = k.shape[1]
    grouped = q.reshape(kv_heads, -1, q.shape[1])  # neighbouring query heads share a kv head
    out = []
    for h in range(kv_heads):
        scores = (grouped[h] @ k[:, h].T) * np.float32(scale)  # (group, n_keys)
        scores = soft_capped(scores, cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out.append(weights @ v[:, h] / weights.sum(axis=1, keepdims=True))
    return np.concatenate(out)


_ROUNDERS: dict[BufferKind, Callable[[np.ndarray], np.ndarray | Q8Rows]] = {
    BufferKind.Q8: quantize_q8,
    BufferKind.BF16: round_bf16,
}
_ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.SIGMOID: sigmoid,
    Activation.IDENTITY: lambda x: x,
}
_GATES: dict[Gating, Callable[[np.ndarray], np.ndarray]] = {
    Gating.SOFTMAX: softmax,
    Gating.SIGMOID: sigmoid,
    Gating.CHOSEN: lambda logits: logits,
}


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
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.max_rows = plan.max_rows
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self.n_window_blocks = n_window_blocks or n_blocks
        self.window = plan.window
        self.hidden = np.empty((0, plan.hidden_width), np.float32)
        self._last: Run | None = None
        self._decoded = [
            finite_values(weights, tensor.name).reshape(tensor.shape)
            if tensor.values is None
            else tensor.values
            for tensor in plan.tensors
        ]
        self.kv_type = kv_type
        dtype = _KV_DTYPES[kv_type]
        self._is_windowed = [window > 0 for window in plan.kv_windows()]
        n_slots = [
            (self.n_window_blocks if is_windowed else n_blocks) * block_tokens
            for is_windowed in self._is_windowed
        ]
        layers = list(zip(n_slots, plan.kv_layers, strict=True))
        self._keys = [np.zeros((n, k.kv_heads, k.head_dim), dtype) for n, k in layers]
        self._values = [np.zeros((n, k.kv_heads, k.value_dim), dtype) for n, k in layers]
        self.n_states = n_states if plan.states else 0
        self._states = [np.zeros((self.n_states, width), np.float32) for width in plan.states]
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
            OpKind.LINEAR_GLU: self._linear_glu,
            OpKind.SCALE: self._scale,
            OpKind.GATE: self._gate,
            OpKind.CONV: self._conv,
            OpKind.DELTA: self._delta,
            OpKind.SCAN: self._scan,
            OpKind.ROUTER: self._router,
            OpKind.EXPERT_GLU: self._expert_glu,
            OpKind.EXPERT_SUM: self._expert_sum,
        }

    def run(self, step: Step) -> np.ndarray:
        if len(step.tokens) > self.max_rows:
            raise ModelError(f"a step of {len(step.tokens)} rows, at most {self.max_rows}")
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
        for states in self._states:
            states[dst] = states[src]

    def close(self) -> None:
        self._decoded.clear()

    def _weight(self, op: Op, name: str) -> np.ndarray | None:
        """The op's weight as float32 (float64 for tables), None where it has none."""
        return self._tensor(op.weight_of(name))

    def _tensor(self, at: int) -> np.ndarray | None:
        return self._decoded[at] if at >= 0 else None

    # -- ops --------------------------------------------------------------------------------

    def _embed(self, run: Run, op: Op) -> None:
        table = self._weight(op, "table")
        assert table is not None
        run.store(op, np.float32(op.float_of("scale")) * table[run.step.tokens])

    def _norm(self, run: Run, op: Op) -> None:
        x = run.floats(op.inputs[0])
        weight, bias = self._weight(op, "weight"), self._weight(op, "bias")
        group, eps, centered = op.int_of("group"), op.float_of("eps"), bool(op.int_of("centered"))
        run.store(op, rms_norm(x, weight, group, eps, bias=bias, centered=centered))

    def _quantize(self, run: Run, op: Op) -> None:
        run.store(op, run.floats(op.inputs[0]))

    def _linear(self, run: Run, op: Op) -> None:
        run.store(op, self._products(run, op, 3), first_col=op.int_of("out_col"))

    def _linear_glu(self, run: Run, op: Op) -> None:
        gate, up = np.split(self._products(run, op, 2), 2, axis=1)
        run.store(op, _gated(op, gate, up))

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

    def _rope_table(self, run: Run, op: Op) -> None:
        inv_freq = self._weight(op, "inv_freq")
        assert inv_freq is not None
        angles = run.step.positions[:, None].astype(np.float64) * inv_freq
        trig = np.stack((np.cos(angles), np.sin(angles)), axis=2) * op.float_of("factor")
        run.store(op, trig.reshape(len(angles), -1).astype(np.float32))

    def _rope_kv(self, run: Run, op: Op) -> None:
        q, k, v = run.split_qkv(op)
        norm_after = op.int_of("norm_after")
        if not norm_after:
            q, k = self._norm_heads(op, q, k)
        if op.inputs[1] >= 0:
            trig, style = run.floats(op.inputs[1]), RopeStyle(op.int_of("style"))
            q, k = rotate(q, trig, style), rotate(k, trig, style)
        if norm_after:
            q, k = self._norm_heads(op, q, k)
        if span := op.int_of("temperature_span"):
            grown = np.log(1 + run.step.positions // span)
            factor = (1 + np.float32(op.float_of("temperature")) * grown).astype(np.float32)
            q = q * factor[:, None, None]
        layer = op.int_of("kv_layer")
        self._keep(run, layer, *map(self._round_kv, (k, v)))
        n = len(q)
        run.store(op, np.concatenate([part.reshape(n, -1) for part in (q, k, v)], axis=1))

    def _norm_heads(self, op: Op, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Over as many values as the weights have: one head, or all of them."""
        q_norm, k_norm = self._weight(op, "q_norm"), self._weight(op, "k_norm")
        q, k = (
            x if w is None else rms_norm(x.reshape(len(x), -1), w, len(w), op.float_of("eps"))
            for x, w in ((q, q_norm), (k, k_norm))
        )
        head_dim = op.int_of("head_dim")
        return q.reshape(len(q), -1, head_dim), k.reshape(len(k), -1, head_dim)

    def _keep(self, run: Run, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        slots = run.slots_of(run.row_seq, run.step.positions, self._is_windowed[layer])
        self._keys[layer][slots] = k
        self._values[layer][slots] = v

    def _round_kv(self, x: np.ndarray) -> np.ndarray:
        """Heads as the cache will hold them. Half precision saturates instead of overflowing."""
        if self.kv_type is KvType.Q8_0:
            return round_q8_0(x)
        return np.clip(x, -65504, 65504) if self.kv_type is KvType.F16 else x

    def _attention(self, run: Run, op: Op) -> None:
        q, _, _ = run.split_qkv(op)
        layer, window = op.int_of("kv_layer"), op.int_of("window")
        scale, cap = op.float_of("scale"), op.float_of("cap")
        out = []
        for row, position in enumerate(run.step.positions):
            first = max(0, position - window + 1) if window else 0
            seen = np.arange(first, position + 1)
            slots = run.slots_of(run.row_seq[row], seen, self._is_windowed[layer])
            k = self._keys[layer][slots].astype(np.float32)
            v = self._values[layer][slots].astype(np.float32)
            out.append(attend(q[row], k, v, scale, cap).reshape(-1))
        run.store(op, np.array(out, np.float32))

    def _glu(self, run: Run, op: Op) -> None:
        gate, up = np.split(run.floats(op.inputs[0]), 2, axis=1)
        run.store(op, _gated(op, gate, up))

    def _gate(self, run: Run, op: Op) -> None:
        x, gate = run.floats(op.inputs[0]), run.floats(op.inputs[1])
        c = np.arange(self.plan.buffers[op.out].width)
        group, stride = op.int_of("group"), op.int_of("gate_stride")
        gate = gate[:, op.int_of("gate_col") + c // group * stride + c % group]
        run.store(op, _activated(op, gate) * x[:, op.int_of("x_col") + c])

    def _conv(self, run: Run, op: Op) -> None:
        x, bias = run.floats(op.inputs[0]), self._weight(op, "bias")
        taps, width = op.int_of("taps"), self.plan.buffers[op.out].width
        kernel = self._weight(op, "kernel")
        assert kernel is not None
        out = np.empty((len(x), width), np.float32)
        for rows, state in self._sequences(run, op):
            own = x[rows, op.int_of("x_col") :][:, :width]
            seen = np.concatenate((state.reshape(taps - 1, width), own))
            out[rows] = convolve(seen, kernel.reshape(width, taps), bias)
            state[:] = seen[len(own) :].reshape(-1)
        run.store(op, _activated(op, out))

    def _delta(self, run: Run, op: Op) -> None:
        k_heads, v_heads, d = (op.int_of(name) for name in ("k_heads", "v_heads", "head_dim"))
        qkv, rates = run.floats(op.inputs[0]), run.floats(op.inputs[1])
        q, k, v = np.split(qkv, [k_heads * d, 2 * k_heads * d], axis=1)
        q, k = (part.reshape(-1, k_heads, d) for part in (q, k))
        v = v.reshape(-1, v_heads, d)
        q, k = (
            part / np.sqrt(np.sum(part * part, axis=2, keepdims=True) + np.float32(1e-6))
            for part in (q, k)
        )
        h = np.arange(v_heads)
        of_head = h // (v_heads // k_heads) if op.int_of("is_grouped") else h % k_heads
        q, k = q[:, of_head] * np.float32(d**-0.5), k[:, of_head]
        rate, decay = sigmoid(rates[:, :v_heads]), self._decay(op, rates[:, v_heads:])[1]
        out = np.empty((len(qkv), v_heads, d), np.float32)
        for rows, state in self._sequences(run, op):
            s = state.reshape(v_heads, d, d)
            for r in range(rows.start, rows.stop):
                s *= decay[r][:, None, None]
                wanted = rate[r][:, None] * (v[r] - np.einsum("hkv,hk->hv", s, k[r]))
                s += k[r][:, :, None] * wanted[:, None, :]
                out[r] = np.einsum("hkv,hk->hv", s, q[r])
        run.store(op, out.reshape(len(qkv), -1))

    def _scan(self, run: Run, op: Op) -> None:
        heads, d, groups, n = op.ints[:4]
        xbc, dt_col = run.floats(op.inputs[0]), op.int_of("dt_col")
        x, b, c = np.split(xbc, [heads * d, heads * d + groups * n], axis=1)
        x = x.reshape(-1, heads, d)
        of_head = np.arange(heads) // (heads // groups)
        b, c = (part.reshape(-1, groups, n)[:, of_head] for part in (b, c))
        dt, decay = self._decay(op, run.floats(op.inputs[1])[:, dt_col : dt_col + heads])
        skip = self._weight(op, "d")
        assert skip is not None
        out = np.empty((len(xbc), heads, d), np.float32)
        for rows, state in self._sequences(run, op):
            s = state.reshape(heads, n, d)
            for r in range(rows.start, rows.stop):
                s *= decay[r][:, None, None]
                s += b[r][:, :, None] * (dt[r][:, None] * x[r])[:, None, :]
                out[r] = np.einsum("hnd,hn->hd", s, c[r]) + skip[:, None] * x[r]
        run.store(op, out.reshape(len(xbc), -1))

    def _decay(self, op: Op, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step sizes and decays of each row and head; `a` is negative."""
        a, dt_bias = self._weight(op, "a"), self._weight(op, "dt_bias")
        assert a is not None
        assert dt_bias is not None
        dt = softplus(rates + dt_bias)
        return dt, np.exp(dt * a)

    def _sequences(self, run: Run, op: Op) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows of each sequence, and what the op's layer keeps of it: a view to be updated."""
        step, states = run.step, self._states[op.int_of("state")]
        for seq, slot in enumerate(step.states):
            rows = slice(step.seq_start[seq], step.seq_start[seq + 1])
            if step.positions[rows][0] == 0:
                states[slot] = 0
            yield rows, states[slot]

    def _router(self, run: Run, op: Op) -> None:
        logits, bias = run.floats(op.inputs[0]), self._weight(op, "bias")
        used, gating = op.int_of("used"), Gating(op.int_of("gating"))
        p = _GATES[gating](logits)
        scores = p if bias is None else p + bias
        if op.int_of("groups") > 1:
            scores = best_groups(scores, op.int_of("groups"), op.int_of("groups_used"))
        # Of equal ones a stable sort leaves the first in front.
        ids = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :used], axis=1)
        weights = np.take_along_axis(p, ids, axis=1)
        if gating is Gating.CHOSEN:
            weights = softmax(weights)
        if op.int_of("renormalize"):
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
        weights = weights * np.float32(op.float_of("scale"))
        run.store(op, np.concatenate([ids.astype(np.float32), weights], axis=1))

    def _expert_glu(self, run: Run, op: Op) -> None:
        pairs, x = run.pairs(op), run.planes(op)
        gate, up = self._weight(op, "gate"), self._weight(op, "up")
        assert gate is not None
        if up is None:
            gate, up = np.split(gate, 2, axis=1)
        gate_bias, up_bias = (
            self._expert_bias(op, name, gate) for name in ("gate_bias", "up_bias")
        )
        out = [
            _gated(op, gate[e] @ x[row] + gate_bias[e], up[e] @ x[row] + up_bias[e])
            for row, e in zip(pairs.rows, pairs.experts, strict=True)
        ]
        run.store(op, np.array(out, np.float32))

    def _expert_sum(self, run: Run, op: Op) -> None:
        pairs, x, down = run.pairs(op), run.planes(op), self._weight(op, "down")
        assert down is not None
        bias = self._expert_bias(op, "bias", down)
        total = np.zeros((len(run.step.tokens), down.shape[1]), np.float32)
        for at, (row, e) in enumerate(zip(pairs.rows, pairs.experts, strict=True)):
            total[row] += pairs.weights[at] * (down[e] @ x[at] + bias[e])
        run.store(op, total)

    def _expert_bias(self, op: Op, name: str, weight: np.ndarray) -> np.ndarray:
        """(experts, rows) of a stacked weight; zeros where it has none."""
        bias = self._weight(op, name)
        shape = weight.shape[:2]
        return np.zeros(shape, np.float32) if bias is None else bias.reshape(shape)

    def _add(self, run: Run, op: Op) -> None:
        x, gate = run.floats(op.inputs[0]), self._weight(op, "gate")
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


def _gated(op: Op, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if op.int_of("activation") == Activation.CLAMPED:
        return clamped_glu(gate, up)
    return _activated(op, gate) * up


def _activated(op: Op, x: np.ndarray) -> np.ndarray:
    return _ACTIVATIONS[Activation(op.int_of("activation"))](x)


class Run:
    """The buffers and row tables of one step."""

    def __init__(self, plan: Plan, step: Step, block_tokens: int) -> None:
        self.plan = plan
        self.step = step
        self.block_tokens = block_tokens
        n_rows = {
            RowKind.ALL: len(step.tokens),
            RowKind.OUT: len(step.out_rows),
            RowKind.HIDDEN: len(step.hidden_rows),
        }
        self.buffers: list[np.ndarray | Q8Rows] = [
            np.zeros((n_rows[b.rows] * b.per_row, b.width), np.float32) for b in plan.buffers
        ]
        n_seqs = len(step.seq_start) - 1
        self.row_seq = np.repeat(np.arange(n_seqs), np.diff(step.seq_start))  # (n_rows)

    def slots_of(
        self, seq: np.ndarray | int, positions: np.ndarray, is_windowed: bool
    ) -> np.ndarray:
        table = self.step.window_table if is_windowed else self.step.block_table
        blocks = table[seq, positions // self.block_tokens]
        return blocks * self.block_tokens + positions % self.block_tokens

    def floats(self, buffer: int) -> np.ndarray:
        rows = self.buffers[buffer]
        return rows.floats() if isinstance(rows, Q8Rows) else rows

    def planes(self, op: Op) -> np.ndarray:
        """The rows x of a product, whether the plan keeps them in one plane or in two."""
        x = self.floats(op.inputs[0])
        return x if op.inputs[1] < 0 else x + self.floats(op.inputs[1])

    def pairs(self, op: Op) -> Pairs:
        used = op.int_of("used")
        ids, weights = np.split(self.floats(op.inputs[2]), [used], axis=1)
        experts = ids.astype(np.intp).reshape(-1)
        order = np.argsort(experts, kind="stable")
        return Pairs(order // used, experts[order], weights.reshape(-1)[order])

    def store(self, op: Op, values: np.ndarray, first_col: int = 0) -> None:
        """Writes or adds an op's result; buffers of other kinds than F32 take whole rows."""
        round_rows = _ROUNDERS.get(self.plan.buffers[op.out].kind)
        if round_rows is not None:
            self.buffers[op.out] = round_rows(values)
            if op.out_rest >= 0:
                self.buffers[op.out_rest] = quantize_q8(values - self.floats(op.out))
            return
        out = self.floats(op.out)[:, first_col : first_col + values.shape[1]]
        out[...] = out + values if op.accumulate else values

    def split_qkv(self, op: Op) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The q, k and v heads in the op's first input, each (n, heads, dim)."""
        rows = self.floats(op.inputs[0])
        heads, kv_heads = op.int_of("heads"), op.int_of("kv_heads")
        head_dim, value_dim = op.int_of("head_dim"), op.int_of("value_dim")
        ends = np.cumsum([heads * head_dim, kv_heads * head_dim])
        q, k, v = np.split(rows, ends, axis=1)
        n = len(rows)
        return (
            q.reshape(n, heads, head_dim),
            k.reshape(n, kv_heads, head_dim),
            v.reshape(n, kv_heads, value_dim),
        )

    def hidden(self) -> np.ndarray:
        at = self.plan.hidden
        return self.floats(at) if at >= 0 else np.empty((0, 0), np.float32)

    def logits(self) -> np.ndarray:
        at = next(i for i, b in enumerate(self.plan.buffers) if b.is_logits)
        return self.floats(at)
