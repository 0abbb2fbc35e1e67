"""Block bookkeeping: order of reuse, exact prefix hits, and invariants after random actions."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from martlet.runtime.block_table import BlockTable
from martlet.runtime.free_list import FreeList
from martlet.runtime.kv_blocks import BlockPool

BLOCK = 4


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def computed(pool: BlockPool, tokens: np.ndarray, salt: bytes = b"") -> BlockTable:
    """A table whose tokens were all computed."""
    table = BlockTable(salt=salt)
    pool.attach_prefix(table, tokens)
    assert pool.grow(table, len(tokens))
    pool.register(table, tokens, len(tokens))
    return table


# ---- free list -----------------------------------------------------------------------------------


def test_free_list_gives_from_the_front_and_loses_from_the_middle() -> None:
    free = FreeList(4)
    free.remove(2)
    assert 2 not in free
    assert [free.pop_front(), free.pop_front(), free.pop_front()] == [0, 1, 3]
    assert len(free) == 0
    with pytest.raises(IndexError):
        free.pop_front()
    free.push_back(1)
    free.push_front(3)
    free.push_back(0)
    assert free.check() == [3, 1, 0]


def test_a_block_cannot_be_freed_or_taken_twice() -> None:
    free = FreeList(2)
    with pytest.raises(AssertionError):
        free.push_back(1)
    free.remove(1)
    with pytest.raises(AssertionError):
        free.remove(1)


# ---- blocks and references -----------------------------------------------------------------------


def test_grow_is_all_or_nothing() -> None:
    pool, table = BlockPool(3, BLOCK), BlockTable()
    assert not pool.grow(table, 13)
    assert (table.blocks, pool.n_free) == ([], 3)
    assert pool.grow(table, 5)
    assert (len(table.blocks), pool.n_free, pool.n_held) == (2, 1, 2)
    assert pool.grow(table, 8), "8 tokens fit into the two blocks it has"
    assert len(table.blocks) == 2
    pool.check([table])


def test_empty_blocks_are_taken_before_cached_ones_and_old_cached_before_new() -> None:
    pool = BlockPool(6, BLOCK)
    old, new = computed(pool, np.arange(8)), computed(pool, np.arange(100, 108))
    old_blocks, new_blocks = old.blocks[:], new.blocks[:]
    empty = {0, 1, 2, 3, 4, 5} - {*old_blocks, *new_blocks}
    pool.release(old)
    pool.release(new)
    assert pool.n_cached == 4
    taker = BlockTable()
    pool.grow(taker, 6 * BLOCK)
    assert set(taker.blocks[:2]) == empty
    assert taker.blocks[2:] == [*reversed(old_blocks), *reversed(new_blocks)], "tail first"
    assert pool.n_cached == 0
    pool.check([taker])


# ---- prefix reuse --------------------------------------------------------------------------------


def test_a_hit_covers_full_blocks_but_never_the_last_token() -> None:
    pool = BlockPool(64, 16)
    tokens = np.arange(200)
    pool.release(computed(pool, tokens[:100]))
    covered = {}
    for n in (1, 16, 17, 96, 97, 100, 120, 200):
        table = BlockTable()
        covered[n] = pool.attach_prefix(table, tokens[:n])
        pool.release(table)
    assert covered == {1: 0, 16: 0, 17: 16, 96: 80, 97: 96, 100: 96, 120: 96, 200: 96}


def test_running_tables_share_the_blocks_of_an_equal_prefix() -> None:
    pool = BlockPool(8, BLOCK)
    first = computed(pool, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    second = computed(pool, ids(1, 2, 3, 4, 5, 6, 7, 8, 10))
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert pool.n_held == 4
    assert not pool.is_writable(first, 0)
    assert pool.is_writable(first, 8)
    pool.release(first)
    pool.check([second])
    assert pool.n_held == 3, "the other still holds them"


def test_equal_blocks_computed_side_by_side_become_one() -> None:
    pool, tokens = BlockPool(8, BLOCK), np.arange(9)
    tables = BlockTable(), BlockTable()
    for table in tables:
        pool.attach_prefix(table, tokens)
        pool.grow(table, 9)
    assert pool.n_held == 6
    for table in tables:
        pool.register(table, tokens, 9)
    pool.check(tables)
    assert tables[0].blocks[:2] == tables[1].blocks[:2]
    assert pool.n_held == 4


def test_only_computed_tokens_are_registered() -> None:
    pool, tokens, table = BlockPool(8, BLOCK), np.arange(12), BlockTable()
    pool.grow(table, 12)
    pool.register(table, tokens, 7)
    other = BlockTable()
    assert pool.attach_prefix(other, tokens) == 4


def test_equal_tokens_after_another_prefix_do_not_hit() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(computed(pool, ids(1, 1, 1, 1, 7, 7, 7, 7)))
    assert pool.attach_prefix(BlockTable(), ids(7, 7, 7, 7, 0)) == 0
    assert pool.attach_prefix(BlockTable(), ids(2, 2, 2, 2, 7, 7, 7, 7, 0)) == 0


@pytest.mark.parametrize("n_digests", [1, 2])
def test_colliding_hashes_never_join_different_prefixes(n_digests: int) -> None:
    """B98: tokens are compared, those of earlier blocks too, so the hash may be anything."""
    pool = BlockPool(32, BLOCK, hash_block=lambda parent, content: bytes([content[0] % n_digests]))
    a, b = ids(2, 1, 1, 1, 7, 7, 7, 7, 0), ids(4, 1, 1, 1, 7, 7, 7, 7, 0)
    first, second = computed(pool, a), computed(pool, b)
    assert not set(first.blocks) & set(second.blocks)
    pool.check([first, second])
    pool.release(first)
    pool.release(second)
    assert pool.attach_prefix(BlockTable(), b) == 0, "the index holds the other sequence"
    assert pool.attach_prefix(BlockTable(), a) > 0


def test_salts_and_fingerprints_keep_equal_tokens_apart() -> None:
    tokens = np.arange(9)
    pool = BlockPool(16, BLOCK)
    pool.release(computed(pool, tokens, salt=b"tenant a"))
    assert pool.attach_prefix(BlockTable(salt=b"tenant b"), tokens) == 0
    assert pool.attach_prefix(BlockTable(), tokens) == 0
    assert pool.attach_prefix(BlockTable(salt=b"tenant a"), tokens) == 8
    digests = set()
    for fingerprint in (b"weights 1", b"weights 2"):
        other = BlockPool(16, BLOCK, fingerprint=fingerprint)
        table = computed(other, tokens)
        assert table.last
        digests.add(table.last.digest)
    assert len(digests) == 2


def test_reuse_can_be_switched_off() -> None:
    pool = BlockPool(8, BLOCK, prefix_reuse=False)
    pool.release(computed(pool, np.arange(9)))
    assert pool.attach_prefix(BlockTable(), np.arange(9)) == 0
    assert (pool.n_cached, pool.n_free) == (0, 8)


# ---- random actions ------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Sequences over two token values, so that prefixes meet often; four blocks short of peace."""

    @initialize(n_blocks=st.integers(1, 12), n_digests=st.sampled_from([1, 3, 2**128]))
    def start(self, n_blocks: int, n_digests: int) -> None:
        def chain(parent: bytes, content: bytes) -> bytes:
            return b"%d" % (zlib.crc32(parent + content) % n_digests)

        self.pool = BlockPool(n_blocks, 2, hash_block=chain)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.live: list[tuple[BlockTable, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def open(self, tokens: list[int]) -> None:
        table = BlockTable()
        n_cached = self.pool.attach_prefix(table, np.array(tokens, np.int32))
        assert n_cached < len(tokens)
        for place, block in enumerate(table.blocks):
            assert self.content[block] == tuple(tokens[: 2 * place + 2]), "a hit on other tokens"
        if self.pool.grow(table, len(tokens)):
            self.live.append((table, tokens))
            self.compute(len(self.live) - 1, n_cached)
        else:
            self.pool.release(table)

    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def append(self, which: int, token: int) -> None:
        if self.live:
            at = which % len(self.live)
            table, tokens = self.live[at]
            if self.pool.grow(table, len(tokens) + 1):
                tokens.append(token)
                self.compute(at, len(tokens) - 1)

    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        if self.live:
            self.pool.release(self.live.pop(which % len(self.live))[0])

    def compute(self, at: int, start: int) -> None:
        table, tokens = self.live[at]
        for position in range(start, len(tokens)):
            assert self.pool.is_writable(table, position), "a shared block is written"
            self.content[table.blocks[position // 2]] = tuple(tokens[: position + 1])
        self.pool.register(table, np.array(tokens, np.int32), len(tokens))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(table for table, _ in self.live)
            for table, tokens in self.live:
                for place, block in enumerate(table.blocks):
                    expected = tuple(tokens[: 2 * place + 2])
                    assert self.content[block] == expected, "a held block has changed"


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_pool_machine = PoolMachine.TestCase
