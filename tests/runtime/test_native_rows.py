"""Rows are independent: a sequence's logits are the same bits whoever shares the step.

Solo runs, one row at a time on one thread, are the truth; random schedules of several sequences
in scattered blocks on any instruction set and thread count must equal them with `==`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.ops import KvType

from .native_library import IS_SANITIZED, ISAS
from .tiny import Chunk, TinyDims, TinyModel, make_step, run_tokens, tiny_model

FORMATS_OF = {
    "llama": ("Q4_K", "Q6_K", "Q8_0"),
    "qwen2": ("Q4_0", "Q5_1", "F16", "Q3_K"),
    "qwen3": ("Q5_K", "Q2_K", "IQ4_XS", "BF16"),
    "gemma3": ("Q4_1", "Q5_0", "IQ4_NL", "F32"),
    "qwen2moe": ("Q4_K", "Q4_0", "Q8_0", "Q6_K"),
}
MAX_ROWS = 64
VOCAB_SIZE = 40
# Tokens of the sequences: four attention splits of 256 positions down to one.
LENGTHS = (300, 260, 40, 61) if IS_SANITIZED else (790, 530, 257, 61)
EXAMPLES = 2 if IS_SANITIZED else 8
POOL_TOKENS = 3 * 1024  # whole blocks of every size for three sequences


@lru_cache
def model(arch: str) -> TinyModel:
    # a window that begins in one split of 256 positions and ends in the next
    dims = TinyDims(ffn_dim=256, vocab_size=VOCAB_SIZE, context=1024, window=300)
    return tiny_model(arch, formats=FORMATS_OF[arch], dims=dims)


def new_executor(
    arch: str,
    *,
    kv_type: KvType,
    block_tokens: int = 32,
    n_threads: int = 1,
    isa: str | None = None,
) -> NativeExecutor:
    return NativeExecutor(
        model(arch).plan(MAX_ROWS),
        model(arch).weights,
        kv_type=kv_type,
        block_tokens=block_tokens,
        n_blocks=POOL_TOKENS // block_tokens,
        n_threads=n_threads,
        isa=isa,
    )


def tokens_of(sequence: int) -> list[int]:
    return np.random.default_rng(sequence).integers(0, VOCAB_SIZE, LENGTHS[sequence]).tolist()


@lru_cache
def solo(arch: str, kv_type: KvType, sequence: int) -> np.ndarray:
    executor = new_executor(arch, kv_type=kv_type, n_threads=1, isa=ISAS[-1])
    try:
        return run_tokens(executor, tokens_of(sequence), chunk=1)
    finally:
        executor.close()


@dataclass(frozen=True)
class Schedule:
    """Who runs, and how the prompts are cut. `sizes` are granted in turn, then whole chunks."""

    sequences: Sequence[int]
    before: int  # rows of each sequence that come in whole chunks first
    sizes: Sequence[int]
    block_tokens: int
    kv_type: KvType
    n_threads: int
    isa: str
    seed: int

    def grants(self, rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
        """Per step (place in `sequences`, first position, rows), in any order."""
        done = [0] * len(self.sequences)
        sizes = iter(self.sizes)
        while True:
            step, room = [], MAX_ROWS
            for at in rng.sample(range(len(done)), len(done)):
                left = LENGTHS[self.sequences[at]] - done[at]
                is_early = done[at] < self.before
                n = min(left, room, MAX_ROWS if is_early else next(sizes, MAX_ROWS))
                if n:
                    step.append((at, done[at], n))
                    done[at] += n
                    room -= n
            if not step:
                return
            yield step


SCHEDULES = st.builds(
    Schedule,
    sequences=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=3),
    before=st.sampled_from([0, 128, 200, 256, 448, 512, 700]),
    sizes=st.lists(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 25, 33]), max_size=60),
    block_tokens=st.sampled_from([16, 32, 48, 256]),
    kv_type=st.sampled_from(KvType),
    n_threads=st.integers(1, 4),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 999),
)


def scattered_blocks(schedule: Schedule, rng: random.Random) -> list[list[int]]:
    free = list(range(POOL_TOKENS // schedule.block_tokens))
    rng.shuffle(free)
    counts = [-(-LENGTHS[s] // schedule.block_tokens) for s in schedule.sequences]
    return [[free.pop() for _ in range(n)] for n in counts]


def fill_pool(executor: NativeExecutor) -> None:
    """Leaves another sequence's keys and values in every slot, as a busy pool would."""
    run_tokens(executor, [7] * (executor.n_blocks * executor.block_tokens))


@pytest.mark.parametrize("arch", FORMATS_OF)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=SCHEDULES)
def test_logits_are_those_of_the_solo_run(arch: str, schedule: Schedule) -> None:
    rng = random.Random(schedule.seed)
    blocks = scattered_blocks(schedule, rng)
    executor = new_executor(
        arch,
        kv_type=schedule.kv_type,
        block_tokens=schedule.block_tokens,
        n_threads=schedule.n_threads,
        isa=schedule.isa,
    )
    try:
        if schedule.isa != "scalar":
            fill_pool(executor)
        for step in schedule.grants(rng):
            chunks = [
                Chunk(tokens_of(schedule.sequences[at])[first : first + n], first, blocks[at])
                for at, first, n in step
            ]
            logits = executor.run(make_step(chunks))
            expected = [
                solo(arch, schedule.kv_type, schedule.sequences[at])[first : first + n]
                for at, first, n in step
            ]
            np.testing.assert_array_equal(logits, np.concatenate(expected), err_msg=str(step))
    finally:
        executor.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KvType)
def test_split_attention_equals_whole_attention(isa: str, kv_type: KvType) -> None:
    """Up to 16 rows a step share out the splits of one sequence; more rows are items of their own.

    With two kv heads and one thread, chunks of 1, 3 and 16 rows are split, 17 and 64 are not.
    """
    tokens = tokens_of(1)[:260]
    by_chunk = []
    for chunk in (3, 16, 17, 64):
        executor = new_executor("gemma3", kv_type=kv_type, n_threads=1, isa=isa)
        by_chunk.append(run_tokens(executor, tokens, chunk=chunk))
        executor.close()
    for logits in by_chunk:
        np.testing.assert_array_equal(logits, solo("gemma3", kv_type, 1)[:260])


@pytest.mark.parametrize(("kv_type", "n_threads"), list(product(KvType, (1, 3))))
def test_a_copied_block_continues_as_its_original(kv_type: KvType, n_threads: int) -> None:
    """Two sequences share 45 tokens: one whole block, and a copy of the block cut at the fork."""
    first = tokens_of(0)[:60]
    second = [*first[:45], *tokens_of(3)[45:60]]
    executor = new_executor("qwen3", kv_type=kv_type, n_threads=n_threads)
    try:
        run_tokens(executor, first[:45], blocks=[5, 9])
        executor.copy_block(9, 2)
        executor.copy_block(5, 5)
        step = [Chunk(first[45:], 45, [5, 9]), Chunk(second[45:], 45, [5, 2])]
        logits = executor.run(make_step(step))
        alone = run_tokens(executor, second, blocks=[11, 12])
    finally:
        executor.close()
    np.testing.assert_array_equal(logits[:15], solo("qwen3", kv_type, 0)[45:60])
    np.testing.assert_array_equal(logits[15:], alone[45:])


def test_order_of_a_step_does_not_show() -> None:
    executor = new_executor("llama", kv_type=KvType.F16, n_threads=2)
    chunks = [Chunk(tokens_of(s)[:20], 0, [s]) for s in range(3)]
    try:
        forward = executor.run(make_step(chunks))
        backward = executor.run(make_step(chunks[::-1]))
    finally:
        executor.close()
    for s in range(3):
        mine, other = forward[20 * s : 20 * s + 20], backward[40 - 20 * s : 60 - 20 * s]
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(mine, solo("llama", KvType.F16, s)[:20])
