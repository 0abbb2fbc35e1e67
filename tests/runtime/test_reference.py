"""The meaning of every op on numbers a person can check by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.executors.reference_math import (
    attend,
    gelu_tanh,
    quantize_q8,
    rms_norm,
    rotate,
    round_bf16,
    silu,
    soft_capped,
)
from martlet.runtime.models import record_plan
from martlet.runtime.ops import Activation, KvType, RopeStyle
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.weights import StoredTensor, StoredWeights

from .op_cases import OP_CASES, OpCase
from .tiny import Chunk, make_step, run_tokens, tiny_model

ARCHS = ("llama", "qwen2", "qwen3", "gemma3")


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# -- pieces -------------------------------------------------------------------------------------


def test_quantize_scales_the_largest_value_to_127() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = 127, -63.5, 1.5, 2.5  # halves go to the even neighbour
    rows = quantize_q8(x)
    assert rows.d.tolist() == [[1, 0]]
    assert rows.q[0, :4].tolist() == [127, -64, 2, 2]
    assert not rows.q[0, 4:].any()


def test_quantize_keeps_the_sign_of_the_largest_and_its_error_small() -> None:
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    rows = quantize_q8(x)
    assert rows.q.min() >= -127
    half_step = np.repeat(rows.d, 32, axis=1) * 0.5001
    assert (np.abs(rows.floats() - x) <= half_step).all()


def test_quantize_of_vanishing_values_is_zero_and_not_infinite() -> None:
    rows = quantize_q8(np.full((1, 32), 1e-40, np.float32))
    assert rows.d.tolist() == [[0]]
    assert not rows.q.any()


def test_bf16_is_the_nearest_of_sixteen_bits_ties_to_even() -> None:
    rounded = {
        0x3F808000: 0x3F800000,  # half way between 1 and the next one: to the even one
        0x3F818000: 0x3F820000,
        0x3F808001: 0x3F810000,
        0xBF807FFF: 0xBF800000,
        0x00008000: 0x00000000,  # the smallest numbers keep their bits as well
        0x00018000: 0x00020000,
        0x80000000: 0x80000000,
        0x7F7F8000: 0x7F800000,  # beyond the largest: infinite
        0xFF800000: 0xFF800000,
        0x7F800001: 0x7FC00000,  # NaN by its low bits alone
        0xFFFFFFFF: 0xFFFF0000,
    }
    x = np.array(list(rounded), np.uint32).view(np.float32)
    assert round_bf16(x).view(np.uint32).tolist() == list(rounded.values())


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.precise], ids=str)
def test_two_planes_hold_fifteen_bits_of_a_result(case: OpCase) -> None:
    exact = replace(case, show_blocks=False, precise=False).run(ReferenceExecutor)
    for planes, floats in zip(case.run(ReferenceExecutor), exact, strict=True):
        error = np.abs(planes - floats).max() / np.abs(floats).max()
        assert 0 < error <= 1 / 254**2 + 1e-6


def test_soft_caps() -> None:
    x = f32(0, 3, 1e9, -1e9)
    assert soft_capped(x, 0.0) is x
    np.testing.assert_allclose(soft_capped(x, 3.0), [0, 3 * np.tanh(1), 3, -3], rtol=1e-6)


def test_layer_norm_takes_off_the_mean_and_adds_a_bias() -> None:
    x = f32(1, 3, 10, 14)[None]
    found = rms_norm(x, f32(2, 1), 2, 0.0, bias=f32(0, 5), centered=True)
    assert found.tolist() == [[-2, 6, -2, 6]]


def test_rms_norm_of_a_row() -> None:
    # mean square of (3, 4) is 12.5
    normed = rms_norm(f32(3, 4)[None], f32(2, 1), group=2, eps=0.0)
    np.testing.assert_allclose(normed, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]], rtol=1e-6)


def test_rms_norm_by_groups_with_a_shared_and_a_full_weight() -> None:
    x = f32(3, 3, 5, -5)[None]  # two groups of equal magnitude: normed to +-1
    assert rms_norm(x, None, 2, 0.0).tolist() == [[1, 1, 1, -1]]
    assert rms_norm(x, f32(10, 20), 2, 0.0).tolist() == [[10, 20, 10, -20]]
    assert rms_norm(x, f32(1, 2, 3, 4), 2, 0.0).tolist() == [[1, 2, 3, -4]]


def test_rms_norm_adds_eps_inside_the_root() -> None:
    assert rms_norm(f32(1, 1)[None], None, 2, eps=3.0).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("style", "expected"),
    [(RopeStyle.PAIR, [-2, 1, -4, 3, 5]), (RopeStyle.HALF, [-3, -4, 1, 2, 5])],
)
def test_rotation_by_a_right_angle(style: RopeStyle, expected: list[float]) -> None:
    heads = f32(1, 2, 3, 4, 5).reshape(1, 1, 5)  # the fifth dim does not turn
    trig = f32(0, 1, 0, 1)[None]  # cos, sin of 90 degrees for both pairs
    assert rotate(heads, trig, style)[0, 0].tolist() == expected


def test_activations() -> None:
    x = f32(-200, -1, 0, 1, 200)
    sigmoid = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(silu(x), f32(0, sigmoid - 1, 0, sigmoid, 200), rtol=1e-6)
    gelu = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    np.testing.assert_allclose(gelu_tanh(x), f32(0, gelu - 1, 0, gelu, 200), rtol=1e-6, atol=1e-7)


def test_attention_of_two_heads_on_one_kv_head() -> None:
    q = f32(0, 0, 1, 0).reshape(2, 2)  # the first head does not care, the second looks at dim 0
    k = f32(math.log(3), 9, 0, 9).reshape(2, 1, 2)
    v = f32(10, 20).reshape(2, 1, 1)
    np.testing.assert_allclose(attend(q, k, v, scale=1.0), np.array([[15], [12.5]]), rtol=1e-6)


def test_neighbouring_query_heads_share_a_kv_head() -> None:
    q = np.zeros((4, 1), np.float32)
    v = f32(1, 2).reshape(1, 2, 1)
    assert attend(q, np.zeros((1, 2, 1), np.float32), v, 1.0).ravel().tolist() == [1, 1, 2, 2]


# -- ops in a plan ------------------------------------------------------------------------------


class Bench:
    """Records ops on embedded rows; run() gives what `shown` holds, per token."""

    def __init__(self, table: Any, *, scale: float = 1.0) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.p = PlanBuilder(StoredWeights(self.tensors), 8)
        self.x = self.p.embed(self.new("table", table), scale)

    def new(self, name: str, values: Any) -> int:
        self.tensors[name] = StoredTensor.from_floats(np.array(values))
        return self.p.weight(name, *self.tensors[name].shape)

    def executor(self, shown: int) -> ReferenceExecutor:
        width = self.p.buffers[shown].width
        identity = self.new("identity", np.eye(width))
        self.p.linear(self.p.take_rows(shown), [identity], name="logits", logits=True)
        return ReferenceExecutor(
            self.p.finish(), StoredWeights(self.tensors), block_tokens=2, n_blocks=4
        )

    def run(self, shown: int, tokens: list[int]) -> list[list[float]]:
        return self.executor(shown).run(make_step([Chunk(tokens, 0, [0, 1])])).tolist()


def test_embed_scales_rows() -> None:
    bench = Bench([[1, 2], [3, 4]], scale=2.0)
    assert bench.run(bench.x, [1, 0, 1]) == [[6, 8], [2, 4], [6, 8]]


def test_linear_stacks_products_with_biases() -> None:
    bench = Bench([[1, 2]])
    weights = [bench.new("w0", [[1, 0], [0, 1], [1, 1]]), bench.new("w1", [[10, 10]])]
    biases = [bench.new("b0", [0.5, 0, 0]), -1]
    assert bench.run(bench.p.linear(bench.x, weights, biases=biases), [0]) == [[1.5, 2, 3, 30]]


def test_linear_and_add_and_norm_accumulate() -> None:
    bench = Bench([[1, -1]])
    y = bench.p.linear(bench.x, [bench.new("w", [[5, 0], [0, 5]])])
    bench.p.add(bench.x, to=y)
    assert bench.p.norm(bench.x, bench.new("n", [100, 100]), 0.0, add_to=y) == y
    bench.p.linear(bench.x, [bench.new("v", [[1000, 0], [0, 1000]])], add_to=y)
    assert bench.run(y, [0]) == [[5 + 1 + 100 + 1000, -1106]]


def test_glu_multiplies_the_activated_gate_with_up() -> None:
    bench = Bench([[0, 200, 7, 3]])
    assert bench.run(bench.p.glu(bench.x, Activation.SILU), [0]) == [[0, 600]]


def test_take_rows_gives_the_wanted_rows_only() -> None:
    bench = Bench([[1], [2], [3]])
    executor = bench.executor(bench.x)
    assert executor.run(make_step([Chunk([0, 1, 2], 0, [0, 1])], [0, 2])).tolist() == [[1], [3]]
    assert executor.run(make_step([Chunk([0], 0, [0])], [])).shape == (0, 1)


def test_rope_turns_by_position_times_frequency() -> None:
    bench = Bench([[1, 0, 1, 0, 5]])  # q | k | v
    p = bench.p
    trig = p.rope_table(np.array([math.pi / 2]), "quarter_turns", factor=2.0)
    layer = p.new_kv_layer(1, 2, 1)
    p.rope_kv(bench.x, trig, kv_layer=layer, heads=1, style=RopeStyle.PAIR)
    turned = bench.run(bench.x, [0, 0, 0])
    expected = [[2, 0, 2, 0, 5], [0, 2, 0, 2, 5], [-2, 0, -2, 0, 5]]
    np.testing.assert_allclose(turned, np.array(expected), atol=1e-6)


def test_head_norm_comes_before_rope_and_leaves_values_alone() -> None:
    bench = Bench([[3, 3, 0, 2, 7]])
    p = bench.p
    layer = p.new_kv_layer(1, 2, 1)
    q_norm, k_norm = bench.new("q_norm", [1, 10]), bench.new("k_norm", [1, 1])
    trig = p.rope_table(np.array([math.pi / 2]), "quarter_turns")
    p.rope_kv(
        bench.x,
        trig,
        kv_layer=layer,
        heads=1,
        style=RopeStyle.HALF,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=0.0,
    )
    root2 = math.sqrt(2)
    expected = [[1, 10, 0, root2, 7], [-10, 1, -root2, 0, 7]]
    np.testing.assert_allclose(bench.run(bench.x, [0, 0]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("window", "means"), [(0, [1, 1.5, 2, 2.5]), (2, [1, 1.5, 2.5, 3.5]), (1, [1, 2, 3, 4])]
)
def test_attention_sees_itself_and_window_minus_one_before(window: int, means: list[float]) -> None:
    bench = Bench([[0, 0, value] for value in (1, 2, 3, 4)])  # equal scores: the mean of values
    p = bench.p
    layer = p.new_kv_layer(1, 1, 1)
    p.rope_kv(bench.x, -1, kv_layer=layer, heads=1, style=RopeStyle.HALF)
    mixed = p.attention(bench.x, kv_layer=layer, heads=1, scale=1.0, window=window)
    assert bench.run(mixed, [0, 1, 2, 3]) == [[mean] for mean in means]


def test_values_are_read_back_as_the_cache_rounded_them() -> None:
    value = 1 + 2**-12  # between two float16 neighbours
    for kv_type, expected in ((KvType.F16, 1.0), (KvType.F32, value)):
        bench = Bench([[0, 0, value]])
        p = bench.p
        layer = p.new_kv_layer(1, 1, 1)
        p.rope_kv(bench.x, -1, kv_layer=layer, heads=1, style=RopeStyle.HALF)
        plan = bench.executor(p.attention(bench.x, kv_layer=layer, heads=1, scale=1.0)).plan
        weights = StoredWeights(bench.tensors)
        executor = ReferenceExecutor(plan, weights, n_blocks=1, kv_type=kv_type)
        assert run_tokens(executor, [0]).item() == expected


# -- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_do_not_depend_on_chunks_neighbours_or_blocks(arch: str) -> None:
    model = tiny_model(arch, formats=("Q4_K", "F32", "Q6_K"))
    tokens, other = list(range(5, 50)), list(range(90, 60, -1))
    executor = ReferenceExecutor(model.plan(96), model.weights, block_tokens=16, n_blocks=8)
    whole = run_tokens(executor, tokens)
    assert (run_tokens(executor, tokens, chunk=1, blocks=[6, 1, 4]) == whole).all()
    assert (run_tokens(executor, tokens, chunk=7) == whole).all()
    both = executor.run(make_step([Chunk(other, 0, [7, 5]), Chunk(tokens, 0, [2, 0, 3])]))
    assert (both[len(other) :] == whole).all()


def test_a_fused_qkv_tensor_equals_three() -> None:
    model = tiny_model("qwen2")
    split = dict(model.weights._tensors)
    fused = {name: t for name, t in split.items() if ".attn_" not in name or "norm" in name}
    for n in range(model.config.n_layers):
        fused[f"blk.{n}.attn_output.weight"] = split[f"blk.{n}.attn_output.weight"]
        for part in ("weight", "bias"):
            three = [split[f"blk.{n}.attn_{k}.{part}"] for k in "qkv"]
            rows = sum(t.shape[0] for t in three)
            data = np.concatenate([t.data for t in three])
            shape = (rows, *three[0].shape[1:])
            fused[f"blk.{n}.attn_qkv.{part}"] = StoredTensor(three[0].format, shape, data)
    plan = record_plan(model.config, StoredWeights(fused), 64)
    logits = run_tokens(ReferenceExecutor(plan, StoredWeights(fused), n_blocks=1), [1, 2, 3])
    expected = run_tokens(ReferenceExecutor(model.plan(), model.weights, n_blocks=1), [1, 2, 3])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_copied_block_serves_as_the_original() -> None:
    model = tiny_model()
    tokens = list(range(20))
    executor = ReferenceExecutor(model.plan(), model.weights, block_tokens=16, n_blocks=3)
    whole = run_tokens(executor, tokens)
    executor.copy_block(0, 2)
    executor._keys[0][:16] = 9  # the original is lost
    rest = executor.run(make_step([Chunk(tokens[16:], 16, [2, 1])]))
    assert (rest == whole[16:]).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_step_may_want_no_logits(arch: str) -> None:
    model = tiny_model(arch)
    tokens = list(range(20))
    executor = ReferenceExecutor(model.plan(), model.weights, n_blocks=1)
    whole = run_tokens(executor, tokens)
    executor._keys[0][:] = 9
    assert executor.run(make_step([Chunk(tokens[:15], 0, [0])], [])).shape == (0, 300)
    assert (executor.run(make_step([Chunk(tokens[15:], 15, [0])])) == whole[15:]).all()


def test_too_many_rows_are_refused() -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.plan(max_rows=4), model.weights, n_blocks=1)
    with pytest.raises(ModelError, match="5 rows, at most 4"):
        executor.run(make_step([Chunk([1] * 5, 0, [0])]))
