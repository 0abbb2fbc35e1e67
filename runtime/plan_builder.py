"""Records a model once, as a plan: a method for every op.

Owns: what architectures call. Must not know: weights' bytes, how an op is computed; the recording
itself is plan_recording.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ModelError
from .ops import Q8_BLOCK, Activation, BufferKind, EmbedBy, Gating, OpKind, RopeStyle, RowKind
from .plan import FLOAT_FORMATS, Op
from .plan_recording import PlanRecording

_MAX_SEGMENTS = 3  # weights that one linear op can stack


@dataclass
class PlanBuilder(PlanRecording):
    """Records ops."""

    def embed(
        self, table: int, scale: float = 1.0, *, by: EmbedBy = EmbedBy.TOKEN, add_to: int = -1
    ) -> int:
        out = add_to if add_to >= 0 else self._buffer("x", self.tensors[table].shape[1])
        op = Op(OpKind.EMBED, out, weights=(table,), ints=(int(by),), floats=(scale,))
        op.accumulate = add_to >= 0
        return self._record(op)

    def norm(
        self,
        x: int,
        weight: int,
        eps: float,
        *,
        bias: int = -1,
        group: int = 0,
        centered: bool = False,
        add_to: int = -1,
    ) -> int:
        """RMS norm of x per `group` values (0: the whole row), without their mean where centered;
        into a new buffer, or added."""
        width = self.buffers[x].width
        out = add_to if add_to >= 0 else self._buffer("norm", width, rows=self.buffers[x].rows)
        return self._record(
            Op(
                OpKind.NORM,
                out,
                inputs=(x,),
                weights=(weight, bias),
                ints=(group or width, int(centered)),
                floats=(eps,),
                accumulate=add_to >= 0,
            )
        )

    def quantize(self, x: int, *, precise: bool = False) -> tuple[int, int]:
        """x rounded, in one plane or, where it is Q8 and asked for, in two; else the second is -1.
        Made once, and kept until x changes."""
        precise = precise and self.activations is BufferKind.Q8
        if x not in self._quantized:
            self._quantized[x] = op = Op(OpKind.QUANTIZE, self._plane(x), inputs=(x,))
            self._record(op)
        op = self._quantized[x]
        if precise and op.out_rest < 0:
            op.out_rest = self._plane(x, "rest")
        return op.out, op.out_rest if precise else -1

    def _plane(self, x: int, suffix: str = "") -> int:
        source = self.buffers[x]
        if source.width % Q8_BLOCK:
            raise ModelError(
                f"rows of {source.width} values cannot be rounded in blocks of {Q8_BLOCK}; "
                "convert the model with F16 weights"
            )
        name = f"{source.name.split('.')[0]}_{suffix or self.activations.name.lower()}"
        return self._buffer(name, source.width, self.activations, source.rows, source.per_row)

    def linear(
        self,
        x: int,
        weights: Sequence[int],
        *,
        biases: Sequence[int] = (),
        add_to: int = -1,
        out_col: int = 0,
        name: str = "linear",
        logits: bool = False,
        precise: bool = False,
        exact: bool = False,
    ) -> int:
        """Stacked products x @ w.T (+ b); x is rounded where the weights take that. Into a new
        buffer, behind out_col columns left free in it, or added.

        Neighbouring weights of one kind become one op, so mixed files record one op per run.
        precise: x is held in two Q8 planes, the second for what the first left, 15 bits in all.
        exact: x is not rounded.
        """
        widths = [self.tensors[w].shape[0] for w in weights]
        rows = self.buffers[x].rows
        out = add_to if add_to >= 0 else self._buffer(name, out_col + sum(widths), rows=rows)
        self.buffers[out].is_logits = logits
        biases = list(biases) or [-1] * len(weights)
        col, start = out_col, 0
        while start < len(weights):
            is_float = exact or self._takes_floats(weights[start])
            stop = start + 1
            while (
                stop < min(len(weights), start + _MAX_SEGMENTS)
                and (exact or self._takes_floats(weights[stop])) == is_float
            ):
                stop += 1
            pad = [-1] * (_MAX_SEGMENTS - (stop - start))
            planes = (x, -1) if is_float else self.quantize(x, precise=precise)
            self._record(
                Op(
                    OpKind.LINEAR,
                    out,
                    inputs=planes,
                    weights=tuple([*weights[start:stop], *pad, *biases[start:stop], *pad]),
                    ints=(col,),
                    accumulate=add_to >= 0,
                )
            )
            col += sum(widths[start:stop])
            start = stop
        self._adapt(x, out, weights, out_col)
        return out

    def _adapt(self, x: int, out: int, weights: Sequence[int], col: int) -> None:
        """What the adapters add to products that are in `out` from column `col` on."""
        for weight in weights:
            rows, cols = self.tensors[weight].shape
            for n, adapter in enumerate(self.adapters):
                parts = adapter.parts_of(self.tensors[weight].name)
                if parts is None:
                    continue
                a = self.weight(parts.a, parts.rank, cols)
                b = self.weight(parts.b, rows, parts.rank)
                low = self._buffer("low", parts.rank, rows=self.buffers[x].rows)
                ints, floats = (col, n), (parts.scale,)
                op = Op(OpKind.ADAPT, out, (x, low), (a, b), ints, floats, accumulate=True)
                self._record(op)
            col += rows

    def _takes_floats(self, weight: int) -> bool:
        """Float weights never meet int8, nor, where rows are no whole blocks, any rounding."""
        if self.activations is BufferKind.F32:
            return True
        tensor = self.tensors[weight]
        is_odd = tensor.shape[-1] % Q8_BLOCK != 0
        return tensor.format in FLOAT_FORMATS and (self.activations is BufferKind.Q8 or is_odd)

    def head_linear(
        self, x: int, weight: int, *, out: int = -1, name: str = "heads", precise: bool = False
    ) -> int:
        """Every head's own product; what a head of x has behind the columns of its matrix stays
        behind the results. Into a new buffer, or the first columns of `out`."""
        heads, rows, cols = self.tensors[weight].shape
        head_dim, odd = divmod(self.buffers[x].width, heads)
        tail, is_float = head_dim - cols, self.tensors[weight].format in FLOAT_FORMATS
        if odd or tail < 0 or rows % Q8_BLOCK or (head_dim % Q8_BLOCK and not is_float):
            raise ModelError(
                f"tensor {self.tensors[weight].name!r} has {heads} heads of {rows} x {cols} for "
                f"{head_dim} values of a head; expected multiples of {Q8_BLOCK}"
            )
        planes = (x, -1) if head_dim % Q8_BLOCK else self._planes(x, [weight], precise)
        if out < 0:
            out = self._buffer(name, heads * (rows + tail), rows=self.buffers[x].rows)
        inputs = (*planes, x if tail else -1)
        return self._record(Op(OpKind.HEAD_LINEAR, out, inputs, (weight,), (heads,)))

    def rope_table(self, inv_freq: np.ndarray, name: str, factor: float = 1.0) -> int:
        """cos and sin of every row's position, shared by all layers that use these frequencies."""
        table = self.table(name, inv_freq)
        out = self._buffer("trig", 2 * len(inv_freq))
        return self._record(Op(OpKind.ROPE_TABLE, out, weights=(table,), floats=(factor,)))

    def rope_kv(
        self,
        qkv: int,
        trig: int,
        *,
        kv_layer: int,
        heads: int,
        style: RopeStyle,
        q_norm: int = -1,
        k_norm: int = -1,
        eps: float = 0.0,
        norm_after: bool = False,
        temperature: float = 0.0,
        temperature_span: int = 0,
        v_norm: bool = False,
    ) -> int:
        kv = self.kv_layers[kv_layer]
        n_rot = self.buffers[trig].width if trig >= 0 else 0
        shape = (heads, kv.kv_heads, kv.head_dim, kv.value_dim)
        order = (int(norm_after), temperature_span, int(v_norm))
        ints = (*shape, n_rot, int(style), kv_layer, *order)
        floats = (eps, temperature)
        return self._record(Op(OpKind.ROPE_KV, qkv, (qkv, trig), (q_norm, k_norm), ints, floats))

    def attention(
        self,
        qkv: int,
        *,
        kv_layer: int,
        heads: int,
        scale: float,
        cap: float = 0.0,
        window: int = 0,
        both_ways: bool = False,
        sinks: int = -1,
    ) -> int:
        kv = self.kv_layers[kv_layer]
        out = self._buffer("attention", heads * kv.value_dim)
        shape = (heads, kv.kv_heads, kv.head_dim, kv.value_dim)
        ints = (*shape, kv_layer, window, int(both_ways))
        return self._record(Op(OpKind.ATTENTION, out, (qkv,), (sinks,), ints, (scale, cap)))

    def glu(self, gate_up: int, activation: Activation) -> int:
        return self._glu("glu", gate_up, self.buffers[gate_up].width // 2, activation)

    def activate(self, x: int, activation: Activation) -> int:
        return self._glu("activated", x, self.buffers[x].width, activation)

    def _glu(self, name: str, x: int, width: int, activation: Activation) -> int:
        out = self._buffer(name, width, rows=self.buffers[x].rows)
        ints = (int(activation), int(width == self.buffers[x].width))
        return self._record(Op(OpKind.GLU, out, (x,), ints=ints))

    def gate(
        self,
        x: int,
        gate: int,
        activation: Activation,
        *,
        width: int,
        x_col: int = 0,
        gate_col: int = 0,
        group: int = 0,
        gate_stride: int = 0,
    ) -> int:
        """`width` columns of x times the activated ones of `gate`: neighbours, or runs of `group`
        columns that begin gate_stride apart."""
        out = self._buffer("gated", width)
        ints = (x_col, gate_col, group or width, gate_stride or width, int(activation))
        return self._record(Op(OpKind.GATE, out, (x, gate), ints=ints))

    def conv(
        self, x: int, kernel: int, bias: int, activation: Activation, *, taps: int, x_col: int = 0
    ) -> int:
        """The kernel's channels, from column x_col of x on, over the last `taps` rows of each."""
        width = self.tensors[kernel].shape[0] // taps
        out, state = self._buffer("conv", width), self.new_state((taps - 1) * width, width)
        ints = (x_col, taps, int(activation), state)
        return self._record(Op(OpKind.CONV, out, (x,), (kernel, bias), ints))

    def delta(
        self,
        qkv: int,
        rates: int,
        a: int,
        dt_bias: int,
        *,
        k_heads: int,
        v_heads: int,
        head_dim: int,
        is_grouped: bool,
    ) -> int:
        out = self._buffer("delta", v_heads * head_dim)
        n_inputs = (2 * k_heads + v_heads) * head_dim + 2 * v_heads
        state = self.new_state(v_heads * head_dim * head_dim, n_inputs)
        ints = (k_heads, v_heads, head_dim, int(is_grouped), state)
        return self._record(Op(OpKind.DELTA, out, (qkv, rates), (a, dt_bias), ints))

    def scan(
        self,
        xbc: int,
        dt: int,
        weights: tuple[int, int, int],
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        dt_col: int = 0,
    ) -> int:
        """weights: a, dt_bias, d."""
        out = self._buffer("scan", heads * head_dim)
        n_inputs = heads * head_dim + 2 * groups * state_dim + heads
        state = self.new_state(heads * state_dim * head_dim, n_inputs)
        ints = (heads, head_dim, groups, state_dim, dt_col, state)
        return self._record(Op(OpKind.SCAN, out, (xbc, dt), weights, ints))

    def router(
        self,
        logits: int,
        gating: Gating,
        used: int,
        *,
        bias: int = -1,
        shares: int = -1,
        groups: int = 1,
        groups_used: int = 1,
        renormalize: bool = False,
        scale: float = 1.0,
    ) -> int:
        """The experts that every row chooses, and what their results count."""
        n_experts = self.buffers[logits].width
        if not 1 <= used <= n_experts // groups * groups_used:
            raise ModelError(f"{used} experts are to be chosen of {n_experts}")
        out = self._buffer("chosen", 2 * used)
        ints = (int(gating), used, groups, groups_used, int(renormalize))
        return self._record(Op(OpKind.ROUTER, out, (logits,), (bias, shares), ints, (scale,)))

    def expert_glu(
        self,
        x: int,
        chosen: int,
        gate: int,
        up: int = -1,
        *,
        biases: tuple[int, int] = (-1, -1),
        activation: Activation,
        alone: bool = False,
        precise: bool = False,
    ) -> int:
        """activation(gate x) * up x of every pair of row and expert, where alone without up x. Else
        up absent: gate holds both."""
        n_experts, width, _ = self._expert_shape(gate)
        used, n_parts = self.buffers[chosen].width // 2, 1 if up >= 0 or alone else 2
        if width % (n_parts * Q8_BLOCK):
            raise ModelError(
                f"experts of {width // n_parts} values are not supported, only multiples of "
                f"{Q8_BLOCK}"
            )
        out = self._buffer("gated", width // n_parts, per_row=used)
        planes = self._planes(x, [w for w in (gate, up) if w >= 0], precise)
        ints = (n_experts, used, int(activation))
        weights = (gate, up, *biases)
        return self._record(Op(OpKind.EXPERT_GLU, out, (*planes, chosen), weights, ints))

    def expert_sum(
        self,
        x: int,
        chosen: int,
        down: int,
        *,
        bias: int = -1,
        add_to: int = -1,
        precise: bool = False,
    ) -> int:
        """The weighted sum of what a row's experts make of its pairs in x."""
        n_experts, width, _ = self._expert_shape(down)
        if width % Q8_BLOCK:
            raise ModelError(
                f"experts with rows of {width} values are not supported, only multiples of "
                f"{Q8_BLOCK}"
            )
        out = add_to if add_to >= 0 else self._buffer("experts", width)
        planes = self._planes(x, [down], precise)
        ints = (n_experts, self.buffers[chosen].width // 2)
        op = Op(OpKind.EXPERT_SUM, out, (*planes, chosen), (down, bias), ints)
        op.accumulate = add_to >= 0
        return self._record(op)

    def _planes(self, x: int, weights: Sequence[int], precise: bool) -> tuple[int, int]:
        """x as these weights take it: floats, or rounded in one plane or two."""
        if any(self._takes_floats(w) for w in weights):
            return x, -1
        return self.quantize(x, precise=precise)

    def _expert_shape(self, weight: int) -> tuple[int, int, int]:
        n_experts, rows, cols = self.tensors[weight].shape
        return n_experts, rows, cols

    def add(self, x: int, *, to: int, gate: int = -1, gate_by: int = -1) -> int:
        """to += x; with a gate, a vector that rows gate_by are multiplied with: sigmoid of it."""
        return self._record(Op(OpKind.ADD, to, (x, gate_by), (gate,), accumulate=True))

    def scale(self, x: int, scale: float, cap: float = 0.0) -> int:
        """In place; cap > 0: a soft bound of the results."""
        return self._record(Op(OpKind.SCALE, x, (x,), floats=(scale, cap)))

    def given(self, width: int) -> int:
        """The rows that a step gives."""
        self.given_width = width
        return self._record(Op(OpKind.COPY, self._buffer("given", width), (-1,), ints=(0,)))

    def beside(self, x: int, y: int) -> int:
        """[x | y]."""
        left, right = self.buffers[x], self.buffers[y]
        out = self._buffer("beside", left.width + right.width, rows=left.rows)
        for at, part in ((0, x), (left.width, y)):
            self._record(Op(OpKind.COPY, out, (part,), ints=(at,)))
        return out

    def take_rows(self, x: int, rows: RowKind = RowKind.OUT) -> int:
        name = "hidden_rows" if rows is RowKind.HIDDEN else "out_rows"
        out = self._buffer(name, self.buffers[x].width, rows=rows)
        return self._record(Op(OpKind.TAKE_ROWS, out, (x,)))
