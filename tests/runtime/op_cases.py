"""Plans of one op each, at odd sizes, for comparing executors op by op.

Every case embeds F32 rows, runs the op and shows its result as logits through an identity matrix,
so that logits equal the op's output exactly. A case's steps are run in order on one executor.

    @pytest.mark.parametrize("case", OP_CASES, ids=str)
    def test_op(case):
        mine, expected = case.run(MyExecutor), case.run(ReferenceExecutor)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from martlet.quant.formats import FORMATS
from martlet.runtime.executors import Executor
from martlet.runtime.ops import Activation, BufferKind, EmbedBy, Gating, RopeStyle
from martlet.runtime.plan import Plan
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.plan_recording import LowRankParts
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredTensor, StoredWeights

from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, Chunk, make_step, random_tensor

OP_TOLERANCE = 2e-5  # max |a - b| / max |b| of one op: float rounding alone
# A value on a rounding boundary of the int8 activations may fall to the other side, and then moves
# a product by one step of 1/254 of the block's largest value.
QUANTIZED_TOLERANCE = 2e-2
PRECISE_TOLERANCE = 1e-4  # as before, but a step is 254 times smaller
BF16_TOLERANCE = 8e-3  # as before; a step is at most 1/128 of a value
MAX_ROWS = 48
N_BLOCKS = 12
N_STATES = 6
BLOCK_TOKENS = 16
_VOCAB = 23


@dataclass(frozen=True)
class OpCase:
    """`op` records on a PlanBuilder what happens to buffer x and returns the buffer to show."""

    name: str
    width: int
    op: Callable[[OpBuilder, int], int]
    steps: Sequence[Step]
    show_blocks: bool = False  # an identity matrix in blocks follows, so its input is quantized
    precise: bool = False  # and that in two planes
    activations: BufferKind = BufferKind.Q8  # what products take, but for the identity in floats

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        """By how much two executors may differ, as max |a - b| / max |b|."""
        if self.activations is BufferKind.BF16:
            return BF16_TOLERANCE
        if not self.show_blocks:
            return OP_TOLERANCE
        return PRECISE_TOLERANCE if self.precise else QUANTIZED_TOLERANCE

    def build(self) -> tuple[Plan, StoredWeights]:
        rng = np.random.default_rng(sum(map(ord, self.name)))
        b = OpBuilder(rng, self.activations)
        table = b.new("table", "F32", _VOCAB, self.width)
        if self.width > 32:  # token 3, the first one, starts with a block of zeros
            b.tensors["table"].data.view(np.float32)[3 * self.width :][:32] = 0
        shown = self.op(b, b.plan.embed(table))
        if self.show_blocks:
            weights = [b.identity(shown, in_blocks=True)]
            shown = b.plan.linear(shown, weights, precise=self.precise)
        b.plan.activations = BufferKind.Q8
        rows = b.plan.take_rows(shown)
        b.plan.linear(rows, [b.identity(rows, in_blocks=False)], name="logits", logits=True)
        return b.plan.finish(), b.weights

    def run(self, new_executor: Callable[..., Executor], **options: Any) -> list[np.ndarray]:
        """Logits of every step; options are handed to the executor."""
        plan, weights = self.build()
        executor = new_executor(
            plan,
            weights,
            block_tokens=BLOCK_TOKENS,
            n_blocks=N_BLOCKS,
            n_states=N_STATES,
            **options,
        )
        try:
            return [executor.run(step).copy() for step in self.steps]
        finally:
            executor.close()


class OpBuilder:
    """A PlanBuilder together with the random weights it records."""

    def __init__(self, rng: np.random.Generator, activations: BufferKind) -> None:
        self.rng = rng
        self.tensors: dict[str, StoredTensor] = {}
        self.weights = StoredWeights(self.tensors)
        self.plan = PlanBuilder(self.weights, MAX_ROWS, activations)

    def new(self, name: str, format_name: str, *shape: int, std: float = 1.0) -> int:
        self.tensors[name] = random_tensor(format_name, shape, self.rng, std)
        return self.plan.weight(name, *shape)

    def bias(self, name: str, *shape: int) -> int:
        """Of all experts at once."""
        self.tensors[name] = random_tensor("F32", shape, self.rng)
        return self.plan.vector(name, *shape)

    def identity(self, x: int, *, in_blocks: bool) -> int:
        name, width = f"identity_{in_blocks}", self.plan.buffers[x].width
        floats = StoredTensor.from_floats(np.eye(width))
        self.tensors[name] = _identity_blocks(width) if in_blocks else floats
        return self.plan.weight(name, width, width)


def _identity_blocks(width: int) -> StoredTensor:
    fmt = FORMATS["Q8_0"]  # | scale f16 | 32 int8 |, scale 1 and a single 1 per row
    blocks = np.zeros((width, width // 32, fmt.nbytes), np.uint8)
    blocks[:, :, :2] = np.ones(1, "<f2").view(np.uint8)
    rows = np.arange(width)
    blocks[rows, rows // 32, 2 + rows % 32] = 1
    return StoredTensor(fmt, (width, width), blocks.reshape(-1))


def one_step(n_rows: int, out_rows: Sequence[int] | None = None) -> list[Step]:
    tokens = [(7 * i + 3) % _VOCAB for i in range(n_rows)]
    return [make_step([Chunk(tokens, 0, range(N_BLOCKS))], out_rows)]


# -- what a case records ------------------------------------------------------------------------


def _embed(format_name: str, scale: float, width: int, b: OpBuilder, _: int) -> int:
    return b.plan.embed(b.new("table2", format_name, _VOCAB, width), scale)


def _embed_by(by: EmbedBy, b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    summed = b.plan.linear(x, [_square(b, x)])
    n_rows = {EmbedBy.TOKEN: _VOCAB, EmbedBy.POSITION: MAX_ROWS, EmbedBy.SEGMENT: 2}[by]
    return b.plan.embed(b.new("table2", "Q8_0", n_rows, width), 0.7, by=by, add_to=summed)


def _embed_from_file(format_name: str, width: int, b: OpBuilder, _: int) -> int:
    b.tensors["table2"] = random_tensor(format_name, (_VOCAB, width), b.rng)
    return b.plan.embed(b.plan.file_rows("table2", _VOCAB, width), 1.5)


def _norm(group: int, weight_size: int, add: bool, b: OpBuilder, x: int) -> int:
    weight = b.new("norm", "F32", weight_size) if weight_size else -1
    add_to = b.plan.linear(x, [_square(b, x)]) if add else -1
    return b.plan.norm(x, weight, 1e-6, group=group, add_to=add_to)


def _layer_norm(group: int, bias_size: int, b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    weight = b.new("norm", "F32", width)
    bias = b.new("bias", "F32", bias_size) if bias_size else -1
    return b.plan.norm(x, weight, 1e-5, bias=bias, group=group, centered=True)


def _scale(scale: float, cap: float, b: OpBuilder, x: int) -> int:
    return b.plan.scale(b.plan.linear(x, [_square(b, x)]), scale, cap)


def _square(b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    return b.new("square", "F32", width, width, std=width**-0.5)


def _nothing(_: OpBuilder, x: int) -> int:
    return x


def _linear(
    formats: Sequence[str], rows: Sequence[int], bias: bool, add: bool, b: OpBuilder, x: int
) -> int:
    width = b.plan.buffers[x].width
    weights = [
        b.new(f"w{i}", fmt, n, width, std=width**-0.5)
        for i, (fmt, n) in enumerate(zip(formats, rows, strict=True))
    ]
    biases = [b.new(f"b{i}", "F32", n) if bias else -1 for i, n in enumerate(rows)]
    add_to = -1
    if add:
        add_to = b.plan.linear(x, [b.new("before", "F32", sum(rows), width, std=width**-0.5)])
    return b.plan.linear(x, weights, biases=biases, add_to=add_to)


def _head_linear(
    fmt: str, heads: int, rows: int, cols: int, precise: bool, b: OpBuilder, x: int
) -> int:
    weight = b.new("w", fmt, heads, rows, cols, std=cols**-0.5)
    return b.plan.head_linear(x, weight, precise=precise)


@dataclass(frozen=True)
class Factors:
    """An adapter of these weights, in floats of this format."""

    ranks: dict[str, int]
    format: str = "F32"

    def parts_of(self, weight: str) -> LowRankParts | None:
        if weight not in self.ranks:
            return None
        return LowRankParts(f"{weight}.a", f"{weight}.b", self.ranks[weight], 0.7)

    def record(self, b: OpBuilder) -> None:
        for weight, rank in self.ranks.items():
            rows, cols = b.tensors[weight].shape
            b.new(f"{weight}.a", self.format, rank, cols, std=cols**-0.5)
            b.new(f"{weight}.b", self.format, rows, rank, std=rank**-0.5)


def _adapt(factors: Factors, rows: Sequence[int], b: OpBuilder, x: int) -> int:
    """A second adapter, of none of these weights, stands before it."""
    width = b.plan.buffers[x].width
    weights = [b.new(f"w{i}", "Q8_0", n, width, std=width**-0.5) for i, n in enumerate(rows)]
    factors.record(b)
    b.plan.adapters = (Factors({}), factors)
    return b.plan.linear(x, weights)


def _adapted_steps() -> list[Step]:
    """Sequences with some, none and a negative share of the second adapter."""
    shares = np.array([[1, 0.5], [0.25, 0], [0, -2]], np.float32)
    return [replace(step, adapters=shares) for step in _mixed_steps()]


def _glu(activation: Activation, b: OpBuilder, x: int) -> int:
    return b.plan.glu(x, activation)


def _activate(activation: Activation, b: OpBuilder, x: int) -> int:
    return b.plan.activate(x, activation)


def _linear_glu(
    formats: tuple[str, str], n_out: int, bias: bool, precise: bool, b: OpBuilder, x: int
) -> int:
    width = b.plan.buffers[x].width
    weights = [b.new(f"w{i}", fmt, n_out, width, std=width**-0.5) for i, fmt in enumerate(formats)]
    biases = [b.new(f"b{i}", "F32", n_out) if bias else -1 for i in range(2)]
    gate_up = b.plan.linear(x, weights, biases=biases, precise=precise)
    return b.plan.glu(gate_up, Activation.SILU)


def _linear_alone(fmt: str, n_out: int, bias: bool, precise: bool, b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    weight = b.new("w", fmt, n_out, width, std=width**-0.5)
    biases = [b.new("b", "F32", n_out) if bias else -1]
    product = b.plan.linear(x, [weight], biases=biases, precise=precise)
    return b.plan.activate(product, Activation.RELU2)


def _add(b: OpBuilder, x: int) -> int:
    other = b.plan.linear(x, [_square(b, x)])
    return b.plan.add(x, to=other)


def _given(width: int, b: OpBuilder, x: int) -> int:
    """What the step gives stands in front of x."""
    return b.plan.beside(b.plan.given(width), x)


def _gate(width: int, runs: dict[str, int], activation: Activation, b: OpBuilder, x: int) -> int:
    n = b.plan.buffers[x].width
    gate = b.plan.linear(x, [b.new("gate", "F32", n, n, std=n**-0.5)])
    return b.plan.gate(x, gate, activation, width=width, **runs)


def _conv(
    width: int, taps: int, bias: bool, activation: Activation, x_col: int, b: OpBuilder, x: int
) -> int:
    b.tensors["kernel"] = random_tensor("F32", (width, taps), b.rng, 0.5)
    kernel = b.plan.vector("kernel", width, taps)
    biases = b.new("bias", "F32", width) if bias else -1
    return b.plan.conv(x, kernel, biases, activation, taps=taps, x_col=x_col)


def _delta(k_heads: int, v_heads: int, dim: int, is_grouped: bool, b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    rates = b.plan.linear(x, [b.new("rates", "F32", 2 * v_heads, width, std=width**-0.5)])
    b.tensors["a"] = StoredTensor.from_floats(-b.rng.uniform(0.01, 2, v_heads))
    return b.plan.delta(
        x,
        rates,
        b.plan.weight("a", v_heads),
        b.new("dt_bias", "F32", v_heads),
        k_heads=k_heads,
        v_heads=v_heads,
        head_dim=dim,
        is_grouped=is_grouped,
    )


def _scan(heads: int, dim: int, groups: int, state_dim: int, b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    dt = b.plan.linear(x, [b.new("dt", "F32", heads + 3, width, std=width**-0.5)])
    b.tensors["a"] = StoredTensor.from_floats(-b.rng.uniform(0.01, 2, heads))
    weights = (b.plan.weight("a", heads), b.new("dt_bias", "F32", heads), b.new("d", "F32", heads))
    return b.plan.scan(
        x, dt, weights, heads=heads, head_dim=dim, groups=groups, state_dim=state_dim, dt_col=3
    )


def _add_gated(b: OpBuilder, x: int) -> int:
    width = b.plan.buffers[x].width
    other = b.plan.linear(x, [_square(b, x)])
    gate = b.new("gate", "F32", width, std=width**-0.5)
    return b.plan.add(x, to=other, gate=gate, gate_by=x)


@dataclass(frozen=True)
class Routing:
    """A router's attributes."""

    used: int
    gating: Gating = Gating.SOFTMAX
    groups: int = 1
    groups_used: int = 1
    renormalize: bool = False
    scale: float = 1.0
    bias: bool = False
    shares: bool = False

    def record(self, b: OpBuilder, logits: int) -> int:
        attributes = {k: v for k, v in self.__dict__.items() if k not in ("bias", "shares")}
        bias = b.new("choice", "F32", b.plan.buffers[logits].width) if self.bias else -1
        shares = b.new("shares", "F32", b.plan.buffers[logits].width) if self.shares else -1
        return b.plan.router(logits, bias=bias, shares=shares, **attributes)


def _router(routing: Routing, b: OpBuilder, x: int) -> int:
    return routing.record(b, x)


@dataclass(frozen=True)
class Experts:
    """The weights of experts: formats of gate, up (None: gate holds both, or stands alone) and
    down."""

    gate: str
    up: str | None
    down: str
    n: int = 6
    rows: int = 64
    used: int = 2
    bias: bool = False
    activation: Activation = Activation.SILU
    alone: bool = False
    add: bool = False
    precise: bool = False


def _experts(e: Experts, b: OpBuilder, x: int) -> int:
    p, width = b.plan, b.plan.buffers[x].width
    logits = p.linear(x, [b.new("router", "F32", e.n, width, std=width**-0.5)])
    chosen = Routing(e.used).record(b, logits)

    def stacked(name: str, fmt: str, rows: int, cols: int) -> int:
        return b.new(name, fmt, e.n, rows, cols, std=cols**-0.5)

    def bias(name: str, rows: int) -> int:
        return b.bias(name, e.n, rows) if e.bias else -1

    gate = stacked("gate", e.gate, e.rows if e.up or e.alone else 2 * e.rows, width)
    up = stacked("up", e.up, e.rows, width) if e.up else -1
    biases = bias("gate_bias", e.rows), -1 if e.alone else bias("up_bias", e.rows)
    gated = p.expert_glu(
        *(x, chosen, gate, up),
        biases=biases,
        activation=e.activation,
        alone=e.alone,
        precise=e.precise,
    )
    down = stacked("down", e.down, width, e.rows)
    add_to = x if e.add else -1
    return p.expert_sum(
        gated, chosen, down, bias=bias("bias", width), add_to=add_to, precise=e.precise
    )


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    n_rot: int = 0
    style: RopeStyle = RopeStyle.HALF
    head_norm: bool = False
    full_norm: bool = False  # over all heads at once
    norm_after: bool = False  # after rope
    temperature: tuple[float, int] = (0.0, 0)
    window: int = 0
    cap: float = 0.0
    both_ways: bool = False
    is_latent: bool = False  # values are the first of the keys
    has_sinks: bool = False
    v_norm: bool = False
    reads: bool = False  # another op's keys and values, with queries of its own
    show_qkv: bool = False  # stop after rope_kv

    @property
    def width(self) -> int:
        values = 0 if self.is_latent else self.kv_heads * self.value_dim
        return (self.heads + self.kv_heads) * self.head_dim + values


def _attention(h: Heads, b: OpBuilder, x: int) -> int:
    p = b.plan
    inv_freq = 10000.0 ** -(np.arange(h.n_rot // 2) * 2 / max(h.n_rot, 1))
    trig = p.rope_table(inv_freq, "rope", factor=0.9) if h.n_rot else -1
    layer = p.new_kv_layer(h.kv_heads, h.head_dim, h.value_dim, is_latent=h.is_latent)
    norms = [-1, -1]
    if h.is_latent and h.head_norm:
        norms[1] = b.new("k_norm", "F32", h.value_dim)
    elif h.head_norm or h.full_norm:
        heads = (h.heads, h.kv_heads) if h.full_norm else (1, 1)
        norms = [
            b.new(f"{k}_norm", "F32", n * h.head_dim) for k, n in zip("qk", heads, strict=True)
        ]
    p.rope_kv(
        x,
        trig,
        kv_layer=layer,
        heads=h.heads,
        style=h.style,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
        norm_after=h.norm_after,
        temperature=h.temperature[0],
        temperature_span=h.temperature[1],
        v_norm=h.v_norm,
    )
    if h.reads:
        width = h.heads * h.head_dim
        x = p.linear(x, [b.new("queries", "F32", width, h.width, std=h.width**-0.5)])
        p.rope_kv(x, trig, kv_layer=layer, heads=h.heads, style=h.style, q_norm=norms[0], eps=1e-6)
    if h.show_qkv:
        return x
    return p.attention(
        x,
        kv_layer=layer,
        heads=h.heads,
        scale=h.head_dim**-0.5,
        cap=h.cap,
        window=h.window,
        both_ways=h.both_ways,
        sinks=b.new("sinks", "F32", h.heads) if h.has_sinks else -1,
    )


def _state_steps() -> list[Step]:
    """The same, with states in scattered slots, of which one sequence takes over a used one."""
    return [
        replace(step, states=np.array(slots, np.int32))
        for step, slots in zip(_mixed_steps(), ([3, 0, 5], [3, 0, 5], [3, 0, 5]), strict=True)
    ] + [
        replace(make_step([Chunk([3, 1, 4, 1], 0, [0])]), states=np.array([5], np.int32)),
        replace(make_step([Chunk([5, 9], 4, [0])]), states=np.array([5], np.int32)),
        *_guessing_steps(),
    ]


def _guessing_steps() -> list[Step]:
    """Rows that are guesses, of which the next step takes all, some or none."""
    plan = (  # of each sequence: rows, those before, guesses, replays
        ((7, 0, 3, 0), (3, 0, 2, 0), (9, 0, 0, 0)),
        ((5, 6, 4, 2), (1, 1, 0, 0), (6, 9, 5, 0)),
        ((3, 11, 0, 4), (4, 2, 1, 0), (1, 11, 0, 1)),
        ((1, 14, 0, 0), (1, 6, 0, 1), (2, 12, 0, 0)),
    )
    blocks, steps = ([7, 2], [0, 11], [3, 8]), []
    for at, texts in enumerate(plan):
        chunks = [
            Chunk([(5 * i + 11 * s + 3 * at) % _VOCAB for i in range(n)], n_past, blocks[s])
            for s, (n, n_past, *_) in enumerate(texts)
        ]
        *_, guesses, replays = np.array(texts, np.int32).T.copy()
        states = np.array([3, 0, 5], np.int32)
        steps.append(replace(make_step(chunks), states=states, guesses=guesses, replays=replays))
    return steps


def _mixed_steps() -> list[Step]:
    """Three sequences in scattered blocks: chunks of unequal length, then single rows."""
    blocks = ([7, 2, 9, 4], [0, 11], [3, 8, 1])
    plan = (((20, 0), (3, 0), (17, 0)), ((21, 20), (1, 3), (1, 17)), ((1, 41), (9, 4), (1, 18)))
    return [
        make_step(
            [
                Chunk([(5 * i + 11 * s + n_past) % _VOCAB for i in range(n)], n_past, blocks[s])
                for s, (n, n_past) in enumerate(grants)
            ]
        )
        for grants in plan
    ]


# -- the table of cases -------------------------------------------------------------------------


def _cases() -> Iterable[OpCase]:
    for fmt in (*FLOAT_FORMATS, *BLOCK_FORMATS):
        width = max(FORMATS[fmt].block, 32) * 2
        yield OpCase(f"embed-{fmt}", 32, partial(_embed, fmt, 3.5, width), one_step(5))
        for n_rows, n_out in ((1, 1), (3, 33), (17, 130)):
            op = partial(_linear, [fmt], [n_out], False, False)
            yield OpCase(f"linear-{fmt}-{n_out}x{width}-{n_rows}rows", width, op, one_step(n_rows))
    for fmt in ("F16", "Q4_0", "Q6_K", "IQ2_XS"):
        op = partial(_embed_from_file, fmt, 512)
        yield OpCase(f"embed-from-file-{fmt}", 32, op, one_step(9))
    for by in EmbedBy:
        segments = np.array([0, 1, 1, 0, 1], np.int32)
        steps = [replace(step, segments=segments) for step in one_step(5)]
        yield OpCase(f"embed-by-{by.name}", 64, partial(_embed_by, by), steps)
    for width, group, weight in ((8, 0, 8), (33, 0, 33), (96, 0, 96), (96, 32, 32), (96, 48, 96)):
        for add in (False, True):
            op = partial(_norm, group, weight, add)
            yield OpCase(f"norm-{width}-by{group}-w{weight}-add{add:d}", width, op, one_step(5))
    for width, group, bias in ((8, 0, 8), (33, 0, 33), (96, 32, 96), (96, 48, 48), (640, 0, 0)):
        op = partial(_layer_norm, group, bias)
        yield OpCase(f"layer_norm-{width}-by{group}-b{bias}", width, op, one_step(5))
    op = partial(_layer_norm, 0, 96)
    yield OpCase("layer_norm-quantized", 96, op, one_step(5), show_blocks=True)
    for scale, cap in ((0.3, 0.0), (-2.0, 0.0), (1.0, 30.0), (3.0, 0.5)):
        op = partial(_scale, scale, cap)
        yield OpCase(f"scale-{scale}-cap{cap}", 37, op, one_step(5))
    yield OpCase("norm-no-weight", 640, partial(_norm, 0, 0, False), one_step(3))
    yield OpCase("norm-quantized", 96, partial(_norm, 0, 96, False), one_step(5), show_blocks=True)
    for width in (32, 96, 256):
        yield OpCase(f"quantize-{width}", width, _nothing, one_step(7), show_blocks=True)
    yield from _linear_cases()
    for fmt, rows, ranks in (
        ("F32", (33, 64), {"w0": 4, "w1": 40}),
        ("F16", (96,), {"w0": 1}),
        ("BF16", (7, 40, 5), {"w1": 33}),
    ):
        op = partial(_adapt, Factors(ranks, fmt), rows)
        yield OpCase(f"adapt-{fmt}", 96, op, _adapted_steps())
    for activation in Activation:
        for width in (6, 64, 130):
            op = partial(_glu, activation)
            yield OpCase(f"glu-{activation.name}-{width}", width, op, one_step(5))
        op = partial(_activate, activation)
        yield OpCase(f"activate-{activation.name}", 37, op, one_step(5))
        op = partial(_glu, activation)
        yield OpCase(f"glu-{activation.name}-quantized", 192, op, one_step(5), show_blocks=True)
    for formats in (("F32", "F16"), ("Q4_1", "Q4_1"), ("Q5_0", "Q8_0")):
        for n_out, n_rows in ((33, 1), (64, 40)):
            for bias in (False, True):
                op = partial(_linear_glu, formats, n_out, bias, not bias)
                name = f"linear_glu-{'-'.join(formats)}-{n_out}-{n_rows}rows-bias{bias:d}"
                yield OpCase(name, 96, op, one_step(n_rows))
    for fmt, n_out, n_rows in (("F16", 33, 1), ("Q4_1", 64, 40)):
        for bias in (False, True):
            op = partial(_linear_alone, fmt, n_out, bias, not bias)
            name = f"linear_alone-{fmt}-{n_out}-{n_rows}rows-bias{bias:d}"
            yield OpCase(name, 96, op, one_step(n_rows))
    op = partial(_linear_glu, ("Q4_0", "Q4_0"), 96, False, False)
    yield OpCase("linear_glu-quantized", 64, op, one_step(17), show_blocks=True)
    yield from _precise_cases()
    yield from _expert_cases()
    yield OpCase("add", 37, _add, one_step(5))
    yield OpCase("add_gated", 37, _add_gated, one_step(5))
    for width, given in ((37, 5), (64, 96)):
        step, rng = one_step(9)[0], np.random.default_rng(width)
        rows = rng.standard_normal((9, given), np.float32)
        yield OpCase(f"given-{given}", width, partial(_given, given), [replace(step, given=rows)])
    yield OpCase("take_rows", 32, _nothing, one_step(9, out_rows=[1, 4, 8]))
    yield OpCase("take_no_rows", 32, _nothing, one_step(9, out_rows=[]))
    yield from _head_linear_cases()
    yield from _attention_cases()
    yield from _state_cases()


def _precise_cases() -> Iterable[OpCase]:
    """Every op that writes two planes, rows of more blocks than are rounded at a time included."""
    heads = Heads(6, 2, 32, 32, n_rot=32)
    ops: dict[str, tuple[int, Callable[[OpBuilder, int], int], list[Step]]] = {
        "quantize": (544, _nothing, one_step(3)),
        "norm": (544, partial(_norm, 0, 544, False), one_step(3)),
        "glu": (2048, partial(_glu, Activation.SILU), one_step(3)),
        "linear_glu": (
            96,
            partial(_linear_glu, ("F32", "F32"), 96, True, False),
            one_step(17),
        ),
        "attention": (heads.width, partial(_attention, heads), _mixed_steps()),
    }
    for name, (width, op, steps) in ops.items():
        yield OpCase(f"{name}-precise", width, op, steps, show_blocks=True, precise=True)


def _expert_cases() -> Iterable[OpCase]:
    routings = {
        "softmax": Routing(3),
        "softmax-renormalized": Routing(5, renormalize=True, scale=2.5),
        "one": Routing(1),
        "all": Routing(40, renormalize=True),
        "sigmoid": Routing(6, Gating.SIGMOID, bias=True, renormalize=True, scale=1.5),
        "groups": Routing(4, Gating.SIGMOID, groups=8, groups_used=3, bias=True),
        "shares": Routing(5, renormalize=True, shares=True),
        "groups-of-one": Routing(4, groups=40, groups_used=4),
        "chosen": Routing(4, Gating.CHOSEN),
    }
    for name, routing in routings.items():  # token 3 has 32 equal logits
        yield OpCase(f"router-{name}", 40, partial(_router, routing), one_step(7))
    experts = {
        "floats": Experts("F32", "F16", "BF16"),
        "floats-fused-bias": Experts("F32", None, "F32", bias=True, used=3),
        "quantized": Experts("Q4_0", "Q4_0", "Q8_0"),
        "fused": Experts("Q4_1", None, "Q5_0", used=4),
        "bias-clamped": Experts("Q8_0", "Q8_0", "Q8_0", bias=True, activation=Activation.CLAMPED),
        "alone": Experts("Q4_0", None, "Q8_0", alone=True, bias=True, activation=Activation.RELU2),
        "add": Experts("Q5_1", "Q4_0", "Q4_1", add=True),
        "one-of-one": Experts("Q8_0", "Q8_0", "Q8_0", n=1, used=1),
        "precise": Experts("Q8_0", "Q8_0", "Q8_0", bias=True, precise=True),
    }
    for name, e in experts.items():
        for n_rows in (1, MAX_ROWS):
            yield OpCase(f"experts-{name}-{n_rows}rows", 64, partial(_experts, e), one_step(n_rows))
    e = Experts("Q4_K", "Q4_K", "Q6_K", n=3, rows=256)
    yield OpCase("experts-super", 256, partial(_experts, e), one_step(9))


def _head_linear_cases() -> Iterable[OpCase]:
    for fmt, heads, rows, cols, tail, precise in (
        ("F32", 3, 32, 9, 5, False),  # values that a head has behind those are kept
        ("F16", 5, 64, 24, 0, False),
        ("Q8_0", 3, 96, 64, 32, False),
        ("Q4_1", 2, 32, 32, 64, True),
        ("Q5_0", 1, 160, 96, 0, True),
        ("Q4_K", 2, 32, 256, 0, False),
    ):
        op = partial(_head_linear, fmt, heads, rows, cols, precise)
        for n_rows in (1, MAX_ROWS):
            name = f"head_linear-{fmt}-{heads}x{rows}x{cols}-{tail}-{n_rows}rows"
            yield OpCase(name, heads * (cols + tail), op, one_step(n_rows))


def _linear_cases() -> Iterable[OpCase]:
    stacks: dict[str, tuple[int, list[str], list[int]]] = {
        "odd-F32": (7, ["F32"], [5]),
        "odd-F16": (37, ["F16"], [19]),
        "long": (2048, ["Q4_1"], [40]),
        "three": (64, ["Q4_0", "Q8_0", "Q5_0"], [40, 24, 8]),
        "four": (64, ["Q4_1", "Q4_1", "Q5_1", "Q4_1"], [16, 1, 31, 40]),
        "mixed": (256, ["Q4_K", "F32", "Q6_K"], [40, 9, 24]),
    }
    for name, (width, formats, rows) in stacks.items():
        for bias in (False, True):
            for add in (False, True):
                op = partial(_linear, formats, rows, bias, add)
                case = f"linear-{name}-bias{bias:d}-add{add:d}"
                yield OpCase(case, width, op, one_step(MAX_ROWS if name == "three" else 5))


def _attention_cases() -> Iterable[OpCase]:
    shapes = {
        "mha": Heads(2, 2, 16, 16, n_rot=16),
        "gqa-pair": Heads(6, 2, 32, 32, n_rot=32, style=RopeStyle.PAIR),
        "gqa-half": Heads(6, 2, 32, 32, n_rot=32),
        "one-kv-head": Heads(4, 1, 64, 64, n_rot=64, head_norm=True),
        "partial-rope": Heads(2, 1, 24, 24, n_rot=8, head_norm=True),
        "partial-pair": Heads(2, 1, 24, 24, n_rot=10, style=RopeStyle.PAIR),
        "no-rope": Heads(3, 3, 10, 10),
        "value-dim": Heads(4, 2, 24, 16, n_rot=24),
        "full-norm": Heads(4, 2, 24, 24, n_rot=24, full_norm=True),
        "norm-after-rope": Heads(4, 2, 32, 32, n_rot=32, head_norm=True, norm_after=True),
        "full-norm-after-rope": Heads(3, 1, 10, 10, n_rot=6, full_norm=True, norm_after=True),
        "temperature": Heads(4, 2, 32, 32, n_rot=32, temperature=(0.4, 5)),
        "temperature-no-rope": Heads(2, 2, 10, 10, temperature=(0.4, 7)),
        "window": Heads(4, 2, 32, 32, n_rot=32, window=10),
        "soft-cap": Heads(4, 2, 32, 32, n_rot=32, cap=1.5, window=20),
        "sinks": Heads(6, 2, 32, 32, n_rot=32, has_sinks=True),
        "sinks-window": Heads(4, 2, 32, 32, n_rot=32, window=10, has_sinks=True),
        "window-of-one": Heads(2, 2, 16, 16, n_rot=16, window=1),
        "both-ways": Heads(4, 2, 32, 32, n_rot=32, both_ways=True),
        "both-ways-window": Heads(4, 1, 16, 16, n_rot=16, window=7, both_ways=True),
        "v-norm": Heads(4, 2, 40, 24, n_rot=32, v_norm=True),
        "reads": Heads(6, 2, 32, 32, n_rot=32, head_norm=True, v_norm=True, reads=True, window=9),
        "wide-head": Heads(2, 1, 256, 256, n_rot=256, head_norm=True, window=18),
        "latent": Heads(
            *(4, 1, 46, 32), n_rot=14, style=RopeStyle.PAIR, head_norm=True, is_latent=True
        ),
        "latent-window": Heads(6, 2, 80, 64, n_rot=16, window=20, is_latent=True),
        "latent-no-rope": Heads(9, 1, 96, 96, is_latent=True),
        "latent-wide": Heads(1, 1, 576, 512, n_rot=64, style=RopeStyle.PAIR, is_latent=True),
        "latent-many": Heads(130, 1, 40, 32, n_rot=6, is_latent=True),
    }
    for name, h in shapes.items():
        for show_qkv in (False, True):
            shown = Heads(**{**h.__dict__, "show_qkv": show_qkv})
            op, stage = partial(_attention, shown), "rope_kv" if show_qkv else "attention"
            yield OpCase(f"{stage}-{name}", h.width, op, _mixed_steps())
    h = shapes["gqa-half"]
    op = partial(_attention, h)
    yield OpCase("attention-quantized", h.width, op, _mixed_steps(), show_blocks=True)


def _state_cases() -> Iterable[OpCase]:
    for activation in (Activation.SIGMOID, Activation.IDENTITY):
        for name, width, columns, runs in (
            ("all", 33, 33, {}),
            ("columns", 90, 40, {"x_col": 7, "gate_col": 50}),
            ("runs", 96, 32, {"x_col": 60, "gate_col": 16, "group": 16, "gate_stride": 48}),
        ):
            op = partial(_gate, columns, runs, activation)
            yield OpCase(f"gate-{activation.name}-{name}", width, op, one_step(5))
    op = partial(_gate, 96, {}, Activation.SILU)
    yield OpCase("gate-quantized", 96, op, one_step(5), show_blocks=True, precise=True)
    for width, taps, bias, activation, x_col in (
        (33, 3, False, Activation.IDENTITY, 0),
        (40, 4, True, Activation.SILU, 9),
        (600, 2, True, Activation.SILU, 0),
    ):
        op = partial(_conv, width, taps, bias, activation, x_col)
        name = f"conv-{width}x{taps}-{activation.name}"
        yield OpCase(name, width + 2 * x_col, op, _state_steps())
    for k_heads, v_heads, dim, is_grouped in ((2, 2, 8, 0), (2, 6, 16, 0), (2, 6, 40, 1)):
        op = partial(_delta, k_heads, v_heads, dim, bool(is_grouped))
        name = f"delta-{k_heads}-{v_heads}-{dim}-grouped{is_grouped}"
        yield OpCase(name, (2 * k_heads + v_heads) * dim, op, _state_steps())
    for heads, dim, groups, state_dim in ((2, 8, 1, 16), (6, 24, 2, 10), (4, 40, 4, 32)):
        op = partial(_scan, heads, dim, groups, state_dim)
        width = heads * dim + 2 * groups * state_dim
        yield OpCase(f"scan-{heads}-{dim}-{groups}-{state_dim}", width, op, _state_steps())


def _bf16(cases: Iterable[OpCase]) -> Iterable[OpCase]:
    """Those of the cases that have a product to show what bf16 rows are."""
    for case in cases:
        rounded = replace(case, name=f"{case.name}-bf16", precise=False, activations=_BF16)
        if any(buffer.kind is _BF16 for buffer in rounded.build()[0].buffers):
            yield rounded


_BF16 = BufferKind.BF16
_INT8_CASES = tuple(_cases())
OP_CASES: tuple[OpCase, ...] = (*_INT8_CASES, *_bf16(_INT8_CASES))
