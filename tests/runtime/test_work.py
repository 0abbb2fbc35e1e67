"""Counting of multiply-adds and bytes on models small enough to count by hand."""

import numpy as np
import pytest
from martlet.quant.formats import FORMATS
from martlet.runtime.model import size_pool
from martlet.runtime.models import record_plan
from martlet.runtime.work import Speed, Work, step_work, steps_work
from martlet.scripts.bench_cases import Bench, Case, Room
from martlet.scripts.bench_open import BLOCK_TOKENS, pool_bytes

from ..recorded import recorded_model
from ..scripts.bench_fakes import CountingExecutor
from .tiny import Chunk, TinyDims, make_step, tiny_model

DIMS = TinyDims(
    dim=64, ffn_dim=96, heads=4, kv_heads=2, head_dim=16, n_layers=3, vocab_size=100, window=20
)
QKV, OUT, GLU = 64 * (64 + 32 + 32), 64 * 64, 3 * 64 * 96
LAYER = QKV + OUT + GLU
HEAD = 64 * 100
VISIBLE_MACS = 4 * (16 + 16)  # per layer, row and visible key
KV_BYTES = 2 * (16 + 16) * 2  # per layer and position, float16
LAYERS_TWICE = 2  # the first and the last layer, and the logits, take two planes of activations


def one_row(position: int, *, wants_logits: bool = True, n_seqs: int = 1) -> Work:
    model = tiny_model("llama", dims=DIMS, formats=("Q8_0",))
    chunks = [Chunk([1], position, [i]) for i in range(n_seqs)]
    step = make_step(chunks, None if wants_logits else [])
    return step_work(model.plan(), step)


def test_a_row_at_position_nine() -> None:
    work = one_row(9)
    planes = LAYER * (DIMS.n_layers + LAYERS_TWICE) + 2 * HEAD
    assert work.int8_macs == planes + DIMS.n_layers * 10 * VISIBLE_MACS
    assert work.weight_bytes == (LAYER * DIMS.n_layers + HEAD) * 34 // 32
    assert work.kv_bytes == DIMS.n_layers * 10 * KV_BYTES
    assert work.f32_macs == 0


def test_without_logits_the_projection_is_neither_computed_nor_read() -> None:
    with_logits, without = one_row(0), one_row(0, wants_logits=False)
    assert with_logits.int8_macs - without.int8_macs == 2 * HEAD
    assert with_logits.weight_bytes - without.weight_bytes == HEAD * 34 // 32


def test_sequences_share_the_weights_but_not_the_keys() -> None:
    one, four = one_row(5), one_row(5, n_seqs=4)
    assert four.int8_macs == 4 * one.int8_macs
    assert four.weight_bytes == one.weight_bytes
    assert four.kv_bytes == 4 * one.kv_bytes


def test_weights_in_floats_count_for_the_other_unit() -> None:
    model = tiny_model("llama", dims=DIMS, formats=("F16",))
    work = step_work(model.plan(), make_step([Chunk([1], 0, [0])]))
    assert work.f32_macs == LAYER * DIMS.n_layers + HEAD
    assert work.weight_bytes == 2 * work.f32_macs
    assert work.int8_macs == DIMS.n_layers * VISIBLE_MACS


def test_a_window_bounds_what_is_seen_and_read() -> None:
    model = tiny_model("gemma3", dims=DIMS, formats=("Q8_0",))
    step = make_step([Chunk([1, 2], 49, [0, 1])], [])
    work = step_work(model.plan(), step)
    # Layers 0 and 2 see the last 20 positions, layer 1 all: 50 and 51.
    local, whole = 20 + 20, 50 + 51
    products = 2 * LAYER * (DIMS.n_layers + LAYERS_TWICE)
    assert work.int8_macs == products + (2 * local + whole) * VISIBLE_MACS
    assert work.kv_bytes == (2 * 21 + 51) * KV_BYTES


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid"])
def test_states_are_read_and_written_once_a_step(name: str) -> None:
    config, weights = recorded_model(name, "Q8_0")
    plan = record_plan(config, weights, 8)

    def kv_bytes(n_rows: int) -> int:
        return step_work(plan, make_step([Chunk([1] * n_rows, 0, [0])])).kv_bytes

    per_token = plan.kv_bytes_per_token()
    assert kv_bytes(1) == 2 * plan.state_bytes + per_token
    assert kv_bytes(5) == 2 * plan.state_bytes + 5 * per_token
    room = Room(n_seqs=6, positions=20)
    n_bytes = pool_bytes(plan, room)
    pool = size_pool(plan, config, BLOCK_TOKENS, context=20, kv_bytes=n_bytes, guesses=0)
    assert pool.n_states is not None
    assert pool.n_states >= room.n_seqs
    assert pool.n_blocks >= room.n_seqs * room.blocks_per_seq(BLOCK_TOKENS)


def test_a_prefill_in_chunks_reads_weights_once_per_chunk() -> None:
    model = tiny_model("llama", dims=DIMS, formats=("Q4_0",))
    plan = model.plan()
    works = []
    for max_rows in (8, 4):
        executor = CountingExecutor(max_rows=max_rows)
        case = Case("prefill", 8)
        bench = Bench(executor, Room.of([case]), DIMS.vocab_size)
        works.append(steps_work(plan, bench.steps(case)))
    whole, halves = works
    assert whole.int8_macs == halves.int8_macs
    layers = LAYER * DIMS.n_layers * FORMATS["Q4_0"].nbytes // 32
    assert halves.weight_bytes - whole.weight_bytes == layers


def test_the_limit_is_the_slower_of_multiplying_and_reading() -> None:
    speed = Speed(int8_macs=100.0, f32_macs=10.0, n_bytes=50.0)
    assert speed.seconds(Work(200, 10, 100, 50)) == pytest.approx((3.0, 3.0))


def test_positions_may_be_large() -> None:
    model = tiny_model("llama", dims=DIMS, formats=("Q8_0",))
    step = make_step([Chunk([1], 0, [0])])
    far = type(step)(
        step.tokens,
        np.array([2**31 - 2], np.int32),
        step.seq_start,
        step.block_table,
        step.out_rows,
    )
    assert step_work(model.plan(), far).kv_bytes == DIMS.n_layers * (2**31 - 1) * KV_BYTES
