"""Plans: the printed form of each architecture, and an arena in which nothing alive overlaps.

After an intended change, write the printed plans anew: MARTLET_WRITE_PLANS=1 pytest FILE.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime.errors import ModelError
from martlet.runtime.models import record_plan, unused_tensors
from martlet.runtime.ops import (
    BUFFER_DTYPE,
    FLAG_ACCUMULATE,
    OP_DTYPE,
    Activation,
    BufferKind,
    OpKind,
)
from martlet.runtime.plan import Plan
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import ENCODERS, TINY, recorded_model
from .tiny import TinyDims, TinyModel, tiny_model

ARCHS = ("llama", "qwen2", "qwen3", "gemma3", "qwen2moe", "qwen3moe")
PLANS = Path(__file__).parents[1] / "data" / "plans"


@pytest.mark.parametrize("arch", ARCHS)
def test_printed_plan_is_as_kept(arch: str) -> None:
    plan = str(tiny_model(arch, formats=("Q4_K", "Q6_K"), tied=arch != "llama").plan())
    path = PLANS / f"{arch}.txt"
    if os.environ.get("MARTLET_WRITE_PLANS"):
        path.write_text(plan)
    assert plan == path.read_text()


@pytest.mark.parametrize("name", sorted({*TINY, *ENCODERS} - {*ARCHS}))
def test_printed_plan_of_a_recorded_checkpoint_is_as_kept(name: str) -> None:
    plan = str(record_plan(*recorded_model(name, "Q8_0"), max_rows=64))
    path = PLANS / f"{name}.txt"
    if os.environ.get("MARTLET_WRITE_PLANS"):
        path.write_text(plan)
    assert plan == path.read_text()


# -- arena --------------------------------------------------------------------------------------


def lifetimes(plan: Plan) -> dict[int, tuple[int, int]]:
    """First and last op that touches each buffer, read from the finished plan."""
    touched: dict[int, list[int]] = {}
    for at, op in enumerate(plan.ops):
        for b in (*op.outs, *op.inputs):
            if b >= 0:
                touched.setdefault(b, []).append(at)
    return {b: (min(ats), max(ats)) for b, ats in touched.items()}


def check_arena(plan: Plan) -> None:
    spans = []
    for b, (first, last) in lifetimes(plan).items():
        buffer = plan.buffers[b]
        if buffer.is_logits:
            continue
        assert buffer.offset >= 0
        assert buffer.offset % 64 == 0
        end = buffer.offset + buffer.row_bytes * plan.max_rows * buffer.per_row
        assert end <= plan.arena_bytes
        spans.append((first, last, buffer.offset, end, buffer.name))
    for i, (first, last, start, end, name) in enumerate(spans):
        for first2, last2, start2, end2, name2 in spans[i + 1 :]:
            apart_in_time = last < first2 or last2 < first
            apart_in_space = end <= start2 or end2 <= start
            assert apart_in_time or apart_in_space, f"{name} overlaps {name2}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("max_rows", [1, 7, 256])
def test_buffers_alive_together_never_overlap(arch: str, max_rows: int) -> None:
    check_arena(tiny_model(arch, formats=("Q8_0", "F32")).plan(max_rows))


def test_the_arena_is_reused_from_layer_to_layer() -> None:
    few, many = (tiny_model(dims=TinyDims(n_layers=n)).plan() for n in (6, 12))
    assert many.arena_bytes == few.arena_bytes


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Ops on buffers picked at random: short and long lives, accumulation, both buffer kinds."""
    widths = (32, 64, 160)
    weights = StoredWeights(
        {
            f"{fmt}.{rows}x{cols}": StoredTensor.from_floats(np.zeros((rows, cols)))
            for fmt in ("a", "b")
            for rows in widths
            for cols in widths
        }
    )
    p = PlanBuilder(FakeFormats(weights), draw(st.integers(1, 9)))
    alive = [p.embed(p.weight(f"a.32x{w}", 32, w)) for w in widths]
    for _ in range(draw(st.integers(1, 25))):
        x = draw(st.sampled_from(alive))
        width = p.buffers[x].width
        kind = draw(st.sampled_from(("norm", "linear", "add_linear", "add", "glu")))
        precise = draw(st.booleans())
        same = [b for b in alive if p.buffers[b].width == width and b != x]
        if kind == "norm":
            alive.append(p.norm(x, -1, 1e-6))
        elif kind == "linear":
            rows, fmt = draw(st.sampled_from(widths)), draw(st.sampled_from("ab"))
            weight = p.weight(f"{fmt}.{rows}x{width}", rows, width)
            alive.append(p.linear(x, [weight], precise=precise))
        elif kind == "add_linear":
            to, fmt = draw(st.sampled_from(alive)), draw(st.sampled_from("ab"))
            rows = p.buffers[to].width
            weight = p.weight(f"{fmt}.{rows}x{width}", rows, width)
            p.linear(x, [weight], add_to=to, precise=precise)
        elif kind == "add" and same:
            p.add(x, to=draw(st.sampled_from(same)))
        elif kind == "glu" and width == 64:
            alive.append(p.glu(x, Activation.SILU))
    last = p.take_rows(draw(st.sampled_from(alive)))
    width = p.buffers[last].width
    p.linear(last, [p.weight(f"a.32x{width}", 32, width)], name="logits", logits=True)
    return p.finish()


class FakeFormats(StoredWeights):
    """Weights named b.* claim to be in blocks, so that their inputs get quantized."""

    def __init__(self, source: StoredWeights) -> None:
        super().__init__(source._tensors)

    def format_name(self, name: str) -> str:
        return "Q8_0" if name.startswith("b.") else "F32"


@settings(max_examples=150, deadline=None)
@given(random_plans())
def test_arena_of_random_plans(plan: Plan) -> None:
    check_arena(plan)
    for op in plan.ops:
        if op.kind is OpKind.LINEAR:
            is_float = plan.tensors[op.weight_of("w0")].format == "F32"
            expected = BufferKind.F32 if is_float else BufferKind.Q8
            assert plan.buffers[op.inputs[0]].kind is expected


# -- recording ----------------------------------------------------------------------------------


def test_quantization_is_folded_into_a_lone_producer_only() -> None:
    weights = {"block": StoredTensor.from_floats(np.zeros((64, 64)))}
    weights["b.w"] = weights["block"]
    for n_readers in (1, 2):
        p = PlanBuilder(FakeFormats(StoredWeights(weights)), 4)
        x = p.norm(p.embed(p.weight("block", 64, 64)), -1, 1e-6)
        y = p.linear(x, [p.weight("b.w", 64, 64)])
        if n_readers == 2:
            y = p.add(x, to=y)
        p.linear(p.take_rows(y), [p.weight("block", 64, 64)], logits=True)
        kinds = [op.kind for op in p.finish().ops]
        assert (OpKind.QUANTIZE in kinds) == (n_readers == 2)


@pytest.mark.parametrize(("width", "kind"), [(64, BufferKind.BF16), (40, BufferKind.F32)])
def test_products_of_float_weights_take_bf16_where_rows_are_whole_blocks(
    width: int, kind: BufferKind
) -> None:
    floats = {"f": StoredTensor.from_floats(np.zeros((width, width)))}
    p = PlanBuilder(StoredWeights(floats), 4, BufferKind.BF16)
    x = p.norm(p.embed(p.weight("f", width, width)), -1, 1e-6)
    p.linear(p.take_rows(p.linear(x, [0], precise=True)), [0], logits=True)
    plan = p.finish()
    products = [op for op in plan.ops if op.kind is OpKind.LINEAR]
    assert [plan.buffers[op.inputs[0]].kind for op in products] == [kind, kind]
    assert all(op.inputs[1] < 0 for op in products)
    norm = next(op for op in plan.ops if op.kind is OpKind.NORM)
    assert plan.buffers[norm.out].kind is kind


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_rows_take_the_place_of_int8_ones(arch: str) -> None:
    """The same ops, no second plane, and no row that enters a product is wider than 16 bits."""
    model = tiny_model(arch, formats=("Q8_0",))
    plans = [
        record_plan(model.config, model.weights, 4, activations=kind)
        for kind in (BufferKind.Q8, BufferKind.BF16)
    ]
    assert [op.kind for op in plans[0].ops] == [op.kind for op in plans[1].ops]
    check_arena(plans[1])
    for op in plans[1].ops:
        assert op.out_rest < 0
        is_router = plans[1].buffers[op.out].name.startswith("router")
        if op.kind in (OpKind.LINEAR, OpKind.LINEAR_GLU) and not is_router:
            assert plans[1].buffers[op.inputs[0]].kind is BufferKind.BF16
    assert ":bf16[" in str(plans[1])


@pytest.mark.parametrize("n_readers", [1, 2])
def test_the_producer_writes_both_planes_of_a_precise_product(n_readers: int) -> None:
    """Two products that share x share its planes, whichever of them asked for the second first."""
    floats = {name: StoredTensor.from_floats(np.zeros((64, 64))) for name in ("f", "b.w")}
    for precise in ((True, False), (False, True)):
        p = PlanBuilder(FakeFormats(StoredWeights(floats)), 4)
        x = p.norm(p.embed(p.weight("f", 64, 64)), -1, 1e-6)
        y = p.linear(x, [p.weight("b.w", 64, 64)], precise=precise[0])
        p.linear(x, [p.weight("b.w", 64, 64)], add_to=y, precise=precise[1])
        if n_readers == 2:
            p.add(x, to=y)
        p.linear(p.take_rows(y), [p.weight("f", 64, 64)], logits=True)
        plan = p.finish()
        check_arena(plan)
        makers = [op for op in plan.ops if op.out_rest >= 0]
        assert [op.kind for op in makers] == [OpKind.NORM if n_readers == 1 else OpKind.QUANTIZE]
        assert (plan.buffers[x].offset < 0) == (n_readers == 1)
        products = [op for op in plan.ops if op.kind is OpKind.LINEAR][:2]
        rests = [makers[0].out_rest if wanted else -1 for wanted in precise]
        assert [op.inputs for op in products] == [(makers[0].out, rest) for rest in rests]


def test_a_changed_buffer_is_quantized_again() -> None:
    weights = {"f": StoredTensor.from_floats(np.zeros((64, 64)))}
    weights["b.w"] = weights["f"]
    p = PlanBuilder(FakeFormats(StoredWeights(weights)), 4)
    x = p.embed(p.weight("f", 64, 64))
    y = p.linear(x, [p.weight("b.w", 64, 64)])
    p.add(y, to=x)
    z = p.linear(x, [p.weight("b.w", 64, 64)])
    p.linear(p.take_rows(z), [p.weight("f", 64, 64)], logits=True)
    assert [op.kind for op in p.finish().ops].count(OpKind.QUANTIZE) == 2


def without(model: TinyModel, name: str) -> StoredWeights:
    tensors = {n: t for n, t in model.weights._tensors.items() if n != name}
    return StoredWeights(tensors)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_down.weight", "blk.1.attn_q.weight", "output_norm.weight"]
)
def test_missing_tensor_is_named(name: str) -> None:
    model = tiny_model()
    with pytest.raises(ModelError, match=name):
        record_plan(model.config, without(model, name), 4)


def test_wrong_shape_is_refused_with_both_shapes() -> None:
    model = tiny_model()
    layers = tuple(replace(layer, ffn_dim=100) for layer in model.config.layers)
    with pytest.raises(ModelError, match=r"ffn_gate.weight' has shape \(512, 256\).*\(100, 256\)"):
        record_plan(replace(model.config, layers=layers), model.weights, 4)


def test_extra_tensors_are_told() -> None:
    model = tiny_model()
    extra = {
        **model.weights._tensors,
        "blk.0.surprise.weight": StoredTensor.from_floats(np.ones(3)),
    }
    weights = StoredWeights(extra)
    plan = record_plan(model.config, weights, 4)
    assert unused_tensors(plan, weights, model.config) == ["blk.0.surprise.weight"]


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    weights = FakeFormats(StoredWeights({"b.w": StoredTensor.from_floats(np.zeros((8, 40)))}))
    p = PlanBuilder(weights, 4)
    w = p.weight("b.w", 8, 40)
    with pytest.raises(ModelError, match="40 values"):
        p.linear(p.embed(w), [w])


def test_records_repeat_the_ops() -> None:
    plan = tiny_model("gemma3").plan()
    ops, buffers = plan.op_records(), plan.buffer_records()
    assert ops.dtype == OP_DTYPE
    assert buffers.dtype == BUFFER_DTYPE
    assert ops["kind"].tolist() == [op.kind for op in plan.ops]
    assert buffers["is_logits"].sum() == 1
    for record, op in zip(ops, plan.ops, strict=True):
        assert bool(record["flags"] & FLAG_ACCUMULATE) == op.accumulate
        assert record["w"][: len(op.weights)].tolist() == list(op.weights)
        assert set(record["w"][len(op.weights) :]) <= {-1}
        assert record["i"][: len(op.ints)].tolist() == list(op.ints)
        assert record["out_rest"] == op.out_rest
    assert (ops["out_rest"] >= 0).any()
    assert plan.kv_bytes_per_token() == 2 * 2 * 2 * 64 * 2
