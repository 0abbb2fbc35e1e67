"""The numba executor against the reference, and that a row never feels its neighbours."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from martlet.runtime.errors import ModelError
from martlet.runtime.executors.numba_executor import NumbaExecutor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import BufferKind, KvType, OpKind
from martlet.runtime.step import Step

from .op_cases import (
    OP_CASES,
    OP_TOLERANCE,
    PRECISE_TOLERANCE,
    QUANTIZED_TOLERANCE,
    OpBuilder,
    OpCase,
)
from .tiny import BLOCK_FORMATS, Chunk, TinyModel, make_step, run_tokens, tiny_model

ARCHS = ("llama", "qwen2", "qwen3", "gemma3")
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 32, 75)]
MOST_THREADS = NumbaExecutor.most_threads()


def relative_error(mine: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size:
        return float(mine.shape != expected.shape)
    return float(np.abs(mine - expected).max() / max(np.abs(expected).max(), 1e-30))


def numba_executor(model: TinyModel, **options: object) -> NumbaExecutor:
    return NumbaExecutor(model.plan(), model.weights, n_blocks=16, **options)  # type: ignore[arg-type]


INT8_CASES = [case for case in OP_CASES if case.activations is BufferKind.Q8]


@pytest.mark.parametrize("case", INT8_CASES, ids=str)
def test_every_op(case: OpCase) -> None:
    for mine, expected in zip(case.run(NumbaExecutor), case.run(ReferenceExecutor), strict=True):
        assert relative_error(mine, expected) <= case.tolerance


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_precise_products(fmt: str) -> None:
    """With two planes the products are those of the floats, to 15 bits."""

    def precise(b: OpBuilder, x: int) -> int:
        weight = b.new("w", fmt, 21, 512, std=512**-0.5)
        return b.plan.linear(x, [weight], biases=[b.new("b", "F32", 21)], precise=True)

    steps = [make_step([Chunk(TOKENS[:n], 0, range(4))]) for n in (1, 7)]
    case = OpCase(f"precise-{fmt}", 512, precise, [_within(step, 23) for step in steps])
    for mine, expected in zip(case.run(NumbaExecutor), case.run(ReferenceExecutor), strict=True):
        assert relative_error(mine, expected) <= PRECISE_TOLERANCE


def _within(step: Step, vocab_size: int) -> Step:
    return replace(step, tokens=step.tokens % vocab_size)


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32])
@pytest.mark.parametrize("arch", ARCHS)
def test_float_models(arch: str, kv_type: KvType) -> None:
    model = tiny_model(arch, formats=("F32", "F16", "BF16"))
    reference = ReferenceExecutor(model.plan(), model.weights, n_blocks=16, kv_type=kv_type)
    mine = run_tokens(numba_executor(model, kv_type=kv_type), TOKENS)
    # A key on a rounding boundary of float16 costs more than float32 arithmetic does.
    tolerance = {KvType.F32: OP_TOLERANCE, KvType.F16: 2e-3}[kv_type]
    assert relative_error(mine, run_tokens(reference, TOKENS)) <= tolerance


@pytest.mark.parametrize("arch", ARCHS)
def test_quantized_models(arch: str) -> None:
    model = tiny_model(arch, formats=("Q4_1", "Q8_0", "Q5_0"))
    reference = ReferenceExecutor(model.plan(), model.weights, n_blocks=16)
    expected = run_tokens(reference, TOKENS)
    assert (
        relative_error(run_tokens(numba_executor(model), TOKENS), expected) <= QUANTIZED_TOLERANCE
    )


# -- rows are independent: equal bit for bit ----------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("formats", [("Q4_0", "Q5_1", "Q8_0"), ("F32", "F16")])
def test_chunks_do_not_matter(arch: str, formats: Sequence[str]) -> None:
    model = tiny_model(arch, formats=formats)
    executor = numba_executor(model)
    at_once = run_tokens(executor, TOKENS)
    for chunk in (1, 2, 3, 5, 31):
        np.testing.assert_array_equal(run_tokens(executor, TOKENS, chunk=chunk), at_once)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_formats_do_not_depend_on_the_number_of_rows(fmt: str) -> None:
    model = tiny_model(formats=(fmt,))
    executor = numba_executor(model)
    at_once = run_tokens(executor, TOKENS[:23])
    np.testing.assert_array_equal(run_tokens(executor, TOKENS[:23], chunk=1), at_once)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_batch_of_sequences_equals_each_alone(arch: str) -> None:
    model = tiny_model(arch, formats=("Q4_1",))
    executor = numba_executor(model)
    sequences = [TOKENS[:37], TOKENS[11:20], TOKENS[5:60]]
    blocks = [[3, 9], [0], [5, 2]]
    alone = [run_tokens(executor, tokens) for tokens in sequences]
    cuts = [(0, 20), (20, 36), (36, 100)]  # the sequences come and end at different steps
    seen: list[list[np.ndarray]] = [[], [], []]
    for start, stop in cuts:
        here = [i for i, tokens in enumerate(sequences) if start < len(tokens)]
        chunks = [Chunk(sequences[i][start:stop], start, blocks[i]) for i in here]
        logits = executor.run(make_step(chunks))
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])[:-1]
        for i, part in zip(here, np.split(logits, ends), strict=True):
            seen[i].append(part)
    for parts, expected in zip(seen, alone, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.skipif(MOST_THREADS < 2, reason="this machine has one core")
@pytest.mark.parametrize("arch", ARCHS)
def test_threads_do_not_matter(arch: str) -> None:
    model = tiny_model(arch, formats=("Q4_1", "Q8_0"))
    one, most = (numba_executor(model, n_threads=n) for n in (1, MOST_THREADS))
    np.testing.assert_array_equal(run_tokens(one, TOKENS), run_tokens(most, TOKENS))


# -- the pool, the contract ---------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32])
def test_a_copied_block_serves_as_the_original(kv_type: KvType) -> None:
    executor = numba_executor(tiny_model("gemma3", formats=("Q8_0",)), kv_type=kv_type)
    prompt, n = TOKENS[:40], executor.block_tokens
    run_tokens(executor, prompt, blocks=[1, 2])
    last = Chunk(TOKENS[40:41], 40, [1, 2])
    original = executor.run(make_step([last]))
    executor.copy_block(1, 7)
    executor.copy_block(2, 4)
    run_tokens(executor, TOKENS[-2 * n :], blocks=[1, 2])  # overwrites the originals
    copied = executor.run(make_step([Chunk(last.tokens, 40, [7, 4])]))
    np.testing.assert_array_equal(copied, original)
    overwritten = executor.run(make_step([last]))
    assert not np.array_equal(overwritten, original)


def test_what_other_sequences_left_in_the_pool_is_not_seen() -> None:
    model = tiny_model(formats=("Q8_0",))
    fresh, used = numba_executor(model), numba_executor(model)
    run_tokens(used, TOKENS)
    for pool in (*used._memory.keys, *used._memory.values):
        pool[pool == 0] = 0x7E00  # NaN in slots never written
    np.testing.assert_array_equal(run_tokens(used, TOKENS[:9]), run_tokens(fresh, TOKENS[:9]))


@pytest.mark.parametrize("activations", [BufferKind.F32, BufferKind.BF16])
def test_rows_it_has_no_products_of_are_refused(activations: BufferKind) -> None:
    model = tiny_model(formats=("Q8_0",))
    plan = record_plan(model.config, model.weights, 64, activations=activations)
    with pytest.raises(ModelError, match="use native or reference for f32 and bf16"):
        NumbaExecutor(plan, model.weights, n_blocks=16)


def test_b102_a_cache_it_does_not_have_is_refused() -> None:
    model = tiny_model(formats=("Q8_0",))
    with pytest.raises(ModelError, match="no q8_0 cache; use f16"):
        numba_executor(model, kv_type=KvType.Q8_0)


def test_products_of_experts_are_refused_as_well() -> None:
    model = tiny_model("qwen3moe", formats=("Q8_0",))
    plan = record_plan(model.config, model.weights, 64, activations=BufferKind.F32)
    kinds = (OpKind.LINEAR, OpKind.EXPERT_GLU, OpKind.EXPERT_SUM)
    for kind in kinds:
        alone = next(op for op in plan.ops if op.kind is kind)
        with pytest.raises(ModelError, match="use native or reference for f32 and bf16"):
            NumbaExecutor(replace(plan, ops=[alone]), model.weights, n_blocks=16)


def test_limits_are_refused_with_their_numbers() -> None:
    model = tiny_model()
    with pytest.raises(ModelError, match="blocks of 24 tokens; use a multiple of 16"):
        numba_executor(model, block_tokens=24)
    for n_threads in (0, MOST_THREADS + 1):
        with pytest.raises(ModelError, match=f"{n_threads} threads; use 1 to {MOST_THREADS}"):
            numba_executor(model, n_threads=n_threads)
    executor = numba_executor(model)
    too_many = [0] * (executor.max_rows + 1)
    with pytest.raises(ModelError, match=f"{len(too_many)} rows, at most {executor.max_rows}"):
        executor.run(make_step([Chunk(too_many, 0, range(16))]))


def test_loading_warms_up_and_says_so() -> None:
    assert numba_executor(tiny_model()).warm_up_ms > 0


def test_starting_threads_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    numba_executor(tiny_model())
    assert dict(os.environ) == before
