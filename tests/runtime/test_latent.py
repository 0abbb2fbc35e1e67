"""Latent attention: what files say of it, a cache that holds a token's row once, rows that come out
the same whatever their company, and plans that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from martlet.runtime import estimate as formulas
from martlet.runtime.config import ModelConfig
from martlet.runtime.errors import FileFormatError, ModelError, UnsupportedError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, Gating, KvType, OpKind
from martlet.runtime.plan_builder import PlanBuilder
from martlet.runtime.plan_recording import LowRankParts
from martlet.runtime.weights import StoredTensor, StoredWeights
from martlet.scripts.shapes import find_shape

from ..recorded import recorded_model
from .native_library import ISAS  # skips the file where there is no native library
from .plan_records import FFI, LIB, Records
from .tiny import Chunk, make_step, run_tokens

NAME = "deepseek2"
TOKENS = np.random.default_rng(7).integers(0, 300, 290).tolist()  # into a second split


# -- what files say ------------------------------------------------------------------------------


def config(**changes: Any) -> ModelConfig:
    """Of DeepSeek-V2-Lite, with other keys; None: without the key."""
    shape = find_shape("deepseek-v2-lite")
    values = {f"deepseek2.{key}": value for key, value in changes.items()}
    found = {**shape.metadata(), "general.architecture": "deepseek2", **values}
    return ModelConfig.from_metadata(
        {key: value for key, value in found.items() if value is not None}, dict(shape.tensors())
    )


def test_a_token_takes_one_compressed_row_in_every_layer() -> None:
    layers = config().layers
    assert [layer.kv_values for layer in layers] == [576] * 27
    assert 2 * sum(layer.kv_values for layer in layers) == 31_104


def test_scores_grow_with_the_logarithm_of_the_factor() -> None:
    plain = config().attention_scale
    assert plain == pytest.approx(192**-0.5)
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
    }
    grown = config(**keys, **{"rope.scaling.yarn_log_multiplier": 0.0707})
    assert grown.attention_scale == pytest.approx(plain * (1 + 0.0707 * math.log(40)) ** 2)
    assert grown.layers[0].rope.amplitude == 1
    untold = config(**keys)  # no multiplier: cos and sin grow, as everywhere else
    assert untold.attention_scale == plain
    assert untold.layers[0].rope.amplitude == pytest.approx(1 + 0.1 * math.log(40))


def test_gating_that_files_of_one_model_leave_unsaid() -> None:
    def gating(**keys: Any) -> Gating:
        experts = config(**{"expert_gating_func": None}, **keys).layers[-1].experts
        assert experts is not None
        return experts.gating

    assert gating() is Gating.SOFTMAX
    assert gating(vocab_size=154_880) is Gating.SIGMOID


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention.key_length_mla": None}, UnsupportedError, "attn_kv_b was split"),
        ({"attention.kv_lora_rank": 256}, FileFormatError, "do not fit kv_lora_rank 256"),
        ({"attention.head_count_kv": 2}, FileFormatError, "2 compressed keys"),
        ({"attention.key_length_mla": 64}, FileFormatError, "heads of 64"),
        ({"rope.dimension_count": 32}, FileFormatError, "32 turn"),
        ({"attention.temperature_scale": 0.1}, UnsupportedError, "queries scaled by position"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        config(**changes)


# -- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", KvType)
def test_the_pool_has_no_plane_for_values(kv_type: KvType) -> None:
    model, weights = recorded_model(NAME)
    plan = record_plan(model, weights, 8)
    executor = NativeExecutor(plan, weights, n_blocks=9, kv_type=kv_type, n_threads=1)
    row = {KvType.F16: 2 * 96, KvType.F32: 4 * 96, KvType.Q8_0: 96 + 2 * 3}[kv_type]
    assert plan.kv_bytes_per_token(kv_type) == 2 * row
    assert executor.kv_bytes == 9 * 2 * 32 * row
    assert executor.kv_bytes == 9 * sum(formulas.kv_block_bytes(plan, 32, kv_type))
    assert formulas.attention_kind(plan) == "MLA 2:1"
    executor.close()


def logits(kv_type: KvType, isa: str, *, chunk: int, n_threads: int) -> np.ndarray:
    model, weights = recorded_model(NAME, "Q8_0")
    executor = NativeExecutor(
        record_plan(model, weights, len(TOKENS)),
        weights,
        n_blocks=10,
        kv_type=kv_type,
        isa=isa,
        n_threads=n_threads,
    )
    try:
        return run_tokens(executor, TOKENS, chunk=chunk)
    finally:
        executor.close()


@pytest.mark.parametrize("kv_type", KvType)
def test_a_row_among_many_equals_the_row_alone(kv_type: KvType) -> None:
    alone = logits(kv_type, ISAS[-1], chunk=1, n_threads=2)
    for isa in ISAS:
        for chunk, n_threads in ((0, 1), (37, 2)):
            many = logits(kv_type, isa, chunk=chunk, n_threads=n_threads)
            np.testing.assert_array_equal(many, alone, err_msg=f"{isa}, {chunk} rows at once")


@pytest.mark.parametrize("kv_type", KvType)
def test_a_block_comes_back_as_it_left(kv_type: KvType) -> None:
    model, weights = recorded_model(NAME)
    plan = record_plan(model, weights, 64)
    executor = NativeExecutor(plan, weights, n_blocks=8, kv_type=kv_type, n_threads=1)
    expected = run_tokens(executor, TOKENS[:40], blocks=[2, 5])
    kept = executor.read_block(2)
    assert len(kept) == 32 * plan.kv_bytes_per_token(kv_type)
    executor.copy_block(2, 3)
    run_tokens(executor, [7] * 32, blocks=[2])
    executor.write_block(6, kept)
    for first in (3, 6):
        again = executor.run(make_step([Chunk(TOKENS[32:40], 32, [first, 5])]))
        np.testing.assert_array_equal(again, expected[32:])
    executor.close()


# -- plans that do not fit -----------------------------------------------------------------------

Spoil = Callable[[Records], None]


def set_op(kind: OpKind, name: str, element: int, value: int) -> Spoil:
    def spoil(r: Records) -> None:
        at = int(np.flatnonzero(r.ops["kind"] == kind)[0])
        r.ops[name].reshape(len(r.ops), -1)[at, element] = value

    return spoil


def set_layer(name: str, value: int) -> Spoil:
    def spoil(r: Records) -> None:
        r.kv_layers[name][0] = value

    return spoil


def kept_of_other_width(r: Records) -> None:
    at = int(np.flatnonzero(r.ops["kind"] == OpKind.HEAD_LINEAR)[0])
    r.ops["in"][at, 2] = r.ops["out"][at]


HEADS, ROPE_KV, ATTENTION = OpKind.HEAD_LINEAR, OpKind.ROPE_KV, OpKind.ATTENTION
SPOILED: dict[str, tuple[Spoil, str]] = {
    "no heads": (set_op(HEADS, "i", 0, 0), "op"),
    "heads that do not divide": (set_op(HEADS, "i", 0, 5), "op"),
    "heads of half a tile": (set_op(HEADS, "i", 0, 128), "op"),
    "a weight out of tensors": (set_op(HEADS, "w", 0, 1000), "op"),
    "a weight that is none": (set_op(HEADS, "w", 0, -1), "op"),
    "rows out of buffers": (set_op(HEADS, "in", 0, 1000), "op"),
    "nothing to keep": (set_op(HEADS, "in", 2, -1), "op"),
    "kept of another width": (kept_of_other_width, "op"),
    "added instead of written": (set_op(HEADS, "flags", 0, 1), "op"),
    "neither latent nor not": (set_layer("is_latent", 2), "is_latent is 2"),
    "values in a plane that is not there": (set_layer("is_latent", 0), "op"),
    "values longer than the key": (set_layer("value_dim", 112), "cannot be its values"),
    "values of half a vector": (set_layer("value_dim", 56), "cannot be its values"),
    "turns within the values": (set_op(ROPE_KV, "i", 4, 34), "op"),
    "queries of other keys": (set_op(ATTENTION, "i", 2, 64), "op"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_plan_is_refused(name: str) -> None:
    model, weights = recorded_model(NAME, "Q8_0")
    records = Records.of(record_plan(model, weights, 8), weights)
    spoil, message = SPOILED[name]
    spoil(records)
    engine, found = records.create()
    if engine != FFI.NULL:
        LIB.mt_engine_free(engine)
    assert engine == FFI.NULL
    assert message in found


def test_compressed_keys_have_whole_blocks() -> None:
    with pytest.raises(ModelError, match="of 24 values are not supported"):
        PlanBuilder(StoredWeights({}), 8).new_kv_layer(1, 32, 24, is_latent=True)


def test_an_adapter_adds_to_keys_where_they_stand_behind_the_queries() -> None:
    shapes = {"table": (3, 4), "w": (6, 4), "a": (2, 4), "b": (6, 2)}
    tensors = {name: StoredTensor.from_floats(np.ones(shape)) for name, shape in shapes.items()}

    class Adapter:
        def parts_of(self, weight: str) -> LowRankParts | None:
            return LowRankParts("a", "b", 2, 1.0) if weight == "w" else None

    b = PlanBuilder(StoredWeights(tensors), 8, BufferKind.F32, adapters=[Adapter()])
    out = b.linear(b.embed(b.weight("table", 3, 4)), [b.weight("w", 6, 4)], out_col=5)
    linear, adapt = b.ops[-2:]
    assert (linear.kind, adapt.kind) == (OpKind.LINEAR, OpKind.ADAPT)
    assert linear.out == adapt.out == out
    assert linear.ints[0] == adapt.ints[0] == 5
