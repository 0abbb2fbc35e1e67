"""The op vocabulary: what each op means, which fields it reads, and its record in C's layout.

Knows nothing of models, executors or memory. The dtypes below are csrc/martlet.h's structs; the
native executor compares their sizes at load. Shapes: n is the number of rows of the output buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

ABI_VERSION = 25
Q8_BLOCK = 32  # activations share one scale per 32 values
FLAG_ACCUMULATE = 1


class OpKind(IntEnum):
    EMBED = 0
    NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    ROPE_TABLE = 4
    ROPE_KV = 5
    ATTENTION = 6
    GLU = 7
    ADD = 8
    TAKE_ROWS = 9
    LINEAR_GLU = 10
    SCALE = 11
    GATE = 12
    CONV = 13
    DELTA = 14
    SCAN = 15
    ROUTER = 16
    EXPERT_GLU = 17
    EXPERT_SUM = 18
    HEAD_LINEAR = 19
    ADAPT = 20
    COPY = 21


class BufferKind(IntEnum):
    F32 = 0  # (n, width) float32
    Q8 = 1  # (n, width) int8 with one float32 scale per 32 values, see q8_row_bytes
    BF16 = 2  # (n, width) the upper 16 bits of float32, rounded to nearest even; rows as of Q8


# What rows are kept as where they enter a product, as --activations names it.
ACTIVATIONS = {"int8": BufferKind.Q8, "f32": BufferKind.F32, "bf16": BufferKind.BF16}


class RowKind(IntEnum):
    ALL = 0  # one row per row of the step
    OUT = 1  # one row per wanted row of logits
    HIDDEN = 2  # one row per wanted hidden state


class RopeStyle(IntEnum):
    PAIR = 0  # rotates dims (2i, 2i+1)
    HALF = 1  # rotates dims (i, i + n_rot/2)


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    SIGMOID = 2
    IDENTITY = 3
    CLAMPED = 4  # min(gate, 7) * sigmoid(1.702 * gate) * (clamp(up, -7, 7) + 1), as of gpt-oss
    GELU_ERF = 5  # gate * (1 + erf(gate / sqrt(2))) / 2
    TANH = 6
    RELU2 = 7  # max(gate, 0)^2


class EmbedBy(IntEnum):
    """Which number of a row chooses its row of a table."""

    TOKEN = 0
    POSITION = 1
    SEGMENT = 2


class Gating(IntEnum):
    """How a router makes weights of its logits."""

    SOFTMAX = 0
    SIGMOID = 1
    CHOSEN = 2  # softmax of the chosen experts' logits alone


class KvType(IntEnum):
    """What the cache holds of keys and values, named as --kv-type names them."""

    F16 = 0
    F32 = 1
    Q8_0 = 2  # int8 with one float16 scale per 32 values of a head

    def head_bytes(self, dim: int) -> int:
        """Bytes of one head's key or value of `dim` values."""
        if self is KvType.Q8_0:
            return dim + 2 * -(-dim // Q8_BLOCK)
        return dim * (2 if self is KvType.F16 else 4)


OP_DTYPE = np.dtype(
    [
        ("kind", "<i4"),
        ("flags", "<i4"),
        ("in", "<i4", (3,)),
        ("out", "<i4"),
        ("out_rest", "<i4"),
        ("w", "<i4", (6,)),
        ("i", "<i4", (10,)),
        ("f", "<f4", (4,)),
    ],
    align=True,
)
BUFFER_DTYPE = np.dtype(
    [
        ("kind", "<i4"),
        ("rows", "<i4"),
        ("width", "<i4"),
        ("is_logits", "<i4"),
        ("per_row", "<i4"),
        ("pad", "<i4"),
        ("offset", "<i8"),
        ("row_bytes", "<i8"),
    ],
    align=True,
)
KV_LAYER_DTYPE = np.dtype(
    [
        *(("kv_heads", "<i4"), ("head_dim", "<i4"), ("value_dim", "<i4")),
        *(("is_windowed", "<i4"), ("is_latent", "<i4")),
    ],
    align=True,
)


@dataclass(frozen=True)
class OpSpec:
    """Names of the fields an op reads, in the order of their slots in the record.

    An op whose `out` is Q8 may have `out_rest`, a second such buffer: the quantized form of what
    the first left over, result - out. Both together hold 15 bits of every value.
    """

    kind: OpKind
    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    ints: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()  # attributes that a printed plan leaves out where they are 0
    meaning: str = ""


OPS: dict[OpKind, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec(
            OpKind.EMBED,
            weights=("table",),
            ints=("by",),
            floats=("scale",),
            unsaid=("by",),
            meaning="out (+)= scale * table[token], or of a row's position or segment; table "
            "(rows, width) of any format",
        ),
        OpSpec(
            OpKind.NORM,
            inputs=("x",),
            weights=("weight", "bias"),
            ints=("group", "centered"),
            floats=("eps",),
            meaning="per group of `group` values, whose mean is taken off first where centered: "
            "out (+)= weight * x / sqrt(mean(x^2) + eps) + bias; weight and bias are as long as "
            "one group or the whole row, or absent",
        ),
        OpSpec(
            OpKind.QUANTIZE,
            inputs=("x",),
            meaning="x in the kind of out. Q8: per 32 values d = max|x| / 127, "
            "q = round_half_even(x * (127 / max|x|)); BF16: nearest even, NaN stays NaN",
        ),
        OpSpec(
            OpKind.LINEAR,
            inputs=("x", "rest"),
            weights=("w0", "w1", "w2", "b0", "b1", "b2"),
            ints=("out_col",),
            meaning="out[:, out_col:] (+)= concat(x @ w0.T + b0, x @ w1.T + b1, x @ w2.T + b2); "
            "x is Q8 for weights in blocks only, else of any kind; a Q8 `rest` is added",
        ),
        OpSpec(
            OpKind.ROPE_TABLE,
            weights=("inv_freq",),
            floats=("factor",),
            meaning="out[2i], out[2i+1] = factor * cos, sin of position * inv_freq[i] "
            "(float64 angles, rounded once); out is (n, n_rot)",
        ),
        OpSpec(
            OpKind.ROPE_KV,
            inputs=("qkv", "trig"),
            weights=("q_norm", "k_norm"),
            ints=(
                *("heads", "kv_heads", "head_dim", "value_dim", "n_rot", "style", "kv_layer"),
                *("norm_after", "temperature_span", "v_norm"),
            ),
            floats=("eps", "temperature"),
            unsaid=("v_norm",),
            meaning="in place on out = qkv (n, [q | k | v]): optional RMS norm of q and of k, over "
            "as many values as its weight has, one head or all; rotation of the first n_rot dims "
            "of every head by trig (absent: none), before the norms where norm_after; where the "
            "span is not 0, q *= 1 + temperature * ln(1 + floor(position / span)); where v_norm, "
            "v / sqrt(mean(v^2) + eps) of every head; then k and v are rounded to the cache's type "
            "and written to their slot of kv_layer. Where qkv is (n, [q]), another op writes them. "
            "Of a latent "
            "layer v is the first value_dim values of k: qkv is (n, [q | k]), the norm of k is "
            "over them alone, and what turns begins behind them",
        ),
        OpSpec(
            OpKind.ATTENTION,
            inputs=("qkv",),
            weights=("sinks",),
            ints=("heads", "kv_heads", "head_dim", "value_dim", "kv_layer", "window", "both_ways"),
            floats=("scale", "cap"),
            unsaid=("cap", "both_ways"),
            meaning="attention of each row over the cached positions of its sequence, "
            "p - window < position <= p (window 0: all), or both ways, up to the sequence's last "
            "row in the step, position < p + window; scores are scale * q k, then where cap "
            "is not 0, cap * tanh(score / cap); sinks (heads): one more score each, whose value is "
            "0; out (n, heads * value_dim)",
        ),
        OpSpec(
            OpKind.GLU,
            inputs=("gate_up",),
            ints=("activation", "alone"),
            unsaid=("alone",),
            meaning="out = activation(gate) * up, gate_up is (n, [gate | up]), or where alone, "
            "(n, gate) and up is 1",
        ),
        OpSpec(
            OpKind.ADD,
            inputs=("x", "by"),
            weights=("gate",),
            meaning="out += x; where there is a gate (width of by), sigmoid(by . gate) * x",
        ),
        OpSpec(
            OpKind.TAKE_ROWS,
            inputs=("x",),
            meaning="out = x[out_rows]; x[hidden_rows] where out has hidden rows",
        ),
        OpSpec(
            OpKind.LINEAR_GLU,
            inputs=("x", "rest"),
            weights=("gate", "up", "gate_bias", "up_bias"),
            ints=("activation",),
            meaning="out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias), or where "
            "there is no up, the activation; x and rest as in linear. Recorded by folding a linear "
            "into the glu that alone reads it",
        ),
        OpSpec(
            OpKind.SCALE,
            inputs=("x",),
            floats=("scale", "cap"),
            meaning="in place on out = x: cap * tanh(scale * x / cap); cap 0: scale * x",
        ),
        OpSpec(
            OpKind.GATE,
            inputs=("x", "gate"),
            ints=("x_col", "gate_col", "group", "gate_stride", "activation"),
            meaning="out[c] = activation(gate[gate_col + c // group * gate_stride + c % group]) "
            "* x[x_col + c]",
        ),
        OpSpec(
            OpKind.CONV,
            inputs=("x",),
            weights=("kernel", "bias"),
            ints=("x_col", "taps", "activation", "state"),
            meaning="causal, per channel c of out, over the rows t of a sequence: "
            "activation(bias[c] + sum over j of kernel[c, j] * x[t - taps + 1 + j, x_col + c]), "
            "j ascending; state: the taps - 1 rows before, zeros before position 0",
        ),
        OpSpec(
            OpKind.DELTA,
            inputs=("qkv", "rates"),
            weights=("a", "dt_bias"),
            ints=("k_heads", "v_heads", "head_dim", "is_grouped", "state"),
            meaning="gated delta rule, per value head h over the rows of a sequence, qkv (n, "
            "[q | k | v]), rates (n, [b | a]): q, k / sqrt(sum of squares + 1e-6), q / sqrt(d); "
            "S = exp(a[h] * softplus(rate + dt_bias[h])) * S; S += outer(k, sigmoid(b) * "
            "(v - S.T @ k)); out = S.T @ q; its q and k are of head h % k_heads, or where grouped "
            "h // (v_heads / k_heads); state: S (v_heads, d, d), by key",
        ),
        OpSpec(
            OpKind.SCAN,
            inputs=("xbc", "dt"),
            weights=("a", "dt_bias", "d"),
            ints=("heads", "head_dim", "groups", "state_dim", "dt_col", "state"),
            meaning="Mamba-2, per head h over the rows of a sequence, xbc (n, [x | B | C]): "
            "dt = softplus(dt[dt_col + h] + dt_bias[h]); "
            "S = exp(dt * a[h]) * S + outer(B, dt * x); "
            "out = S.T @ C + d[h] * x; B and C are of group h // (heads / groups); "
            "state: S (heads, state_dim, head_dim)",
        ),
        OpSpec(
            OpKind.ROUTER,
            inputs=("logits",),
            weights=("bias", "shares"),
            ints=("gating", "used", "groups", "groups_used", "renormalize"),
            floats=("scale",),
            meaning="out (n, [used ids | used weights]): the experts with the largest p + bias, in "
            "ascending order, p = gating(logits). Of groups of neighbouring experts only the "
            "groups_used with the largest sum of their two best count. Of equal ones the first is "
            "taken. Weights are scale * p, divided by the sum of all used p if renormalize, times "
            "the expert's share where there are shares",
        ),
        OpSpec(
            OpKind.EXPERT_GLU,
            inputs=("x", "rest", "chosen"),
            weights=("gate", "up", "gate_bias", "up_bias"),
            ints=("experts", "used", "activation"),
            meaning="linear_glu of every pair of a row and an expert it has chosen; out has a row "
            "per pair, sorted by expert, then by row. Weights are (experts, rows, cols); without "
            "up, gate may hold both, (experts, [gate | up], cols)",
        ),
        OpSpec(
            OpKind.EXPERT_SUM,
            inputs=("x", "rest", "chosen"),
            weights=("down", "bias"),
            ints=("experts", "used"),
            meaning="out (+)= sum of weight * (x @ down.T + bias) over the pairs of a row, in "
            "ascending order of experts; x has a row per pair, as expert_glu leaves them",
        ),
        OpSpec(
            OpKind.HEAD_LINEAR,
            inputs=("x", "rest", "kept"),
            weights=("weight",),
            ints=("heads",),
            meaning="first columns of out = per head [x_h @ w_h.T | what is behind in kept]: x is "
            "(n, heads * d) of any kind, w (heads, rows, cols), rows a multiple of 32, x_h the "
            "first cols of a head's d values; kept: these values as floats, absent where d = cols",
        ),
        OpSpec(
            OpKind.ADAPT,
            inputs=("x", "low"),
            weights=("a", "b"),
            ints=("out_col", "adapter"),
            floats=("scale",),
            meaning="low = scale * s * (x @ a.T), then out[:, out_col:] += low @ b.T, where s is "
            "what the step gives the row's sequence of this adapter; rows without any of it stay",
        ),
        OpSpec(
            OpKind.COPY,
            inputs=("x",),
            ints=("out_col",),
            unsaid=("out_col",),
            meaning="out[:, out_col:] = x, in as many columns as x has; without x, out = the rows "
            "that the step gives",
        ),
    )
}


def q8_row_bytes(width: int) -> int:
    """Bytes from one Q8 or BF16 row to the next: a 64-byte record (mt_q8_block) per 32 values.

    An odd number of records: rows a power of two apart would fight for the same cache lines.
    """
    return (width // Q8_BLOCK | 1) * 64
