"""Bookkeeping of the paged KV pool: who holds which block, and which blocks hold known prefixes.

Owns: reference counts, the free list, what enters and leaves the prefix index. Must not know: keys
and values (executor), requests, rows. The scheduler is the only caller that changes it.

A block is in one of three conditions:

    held      references > 0; in no list. Held by several tables only if it is registered.
    cached    references = 0, registered in the prefix index; in the free list's back part
    empty     references = 0, not registered; in the free list's front part

The free list is taken from the front, so cached blocks are given up last, and among them the one
released longest ago first. A table is released from its tail, and who holds a block holds all
blocks before it; so no cached block outlives the prefix it depends on.

Only full blocks whose keys and values are final are registered and shared, and a table writes only
behind its last full block. So a shared block is never written. A block that would be shared and
written, being equal only at its start, is copied beforehand (partial_hits.py).
When equal blocks were computed side by side, the later table takes over the registered block and
gives back its own: the bits are the same by the law of row independence.

Layers with a window keep their keys and values in parts (window_parts.py) that not every block has.
A prefix is of use only up to a place whose window still has all its parts. Recurrent layers go on
only from a block behind which their state was kept (state_slots.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from .block_table import BlockTable, SecondTier
from .errors import ModelError
from .free_list import FreeList
from .prefix_index import HashBlock, Key, Miss, Prefix, PrefixIndex, TokenIds, blake2b_chain
from .state_slots import StateSlots
from .window_parts import WindowParts

Frontier = tuple[Prefix | None, bytes]
"""The block a sequence needs next: the known prefix before it, and its content."""


class BlockPool:
    """n_blocks blocks of block_tokens tokens. All operations cost O(blocks touched)."""

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        *,
        prefix_reuse: bool = True,
        fingerprint: bytes = b"",
        hash_block: HashBlock = blake2b_chain,
        tier: SecondTier | None = None,
        window: int = 0,
        n_window_blocks: int | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """fingerprint: all that shapes keys and values besides tokens (weights, KV type, mode).
        window: what layers with one see, if they have n_window_blocks of their own.
        states: the slots of recurrent layers, if there are any."""
        if n_blocks < 1 or block_tokens < 1:
            raise ModelError(f"pool of {n_blocks} blocks of {block_tokens}; both must be positive")
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.prefix_reuse = prefix_reuse
        self._tier = tier
        self._references = [0] * n_blocks
        self._prefixes: list[Prefix | None] = [None] * n_blocks
        self._index = PrefixIndex(block_tokens, fingerprint, hash_block, 4 * n_blocks)
        self._free = FreeList(n_blocks)
        self._n_cached = 0
        self.states = states
        self.parts: WindowParts | None = None
        if window and n_window_blocks not in (None, n_blocks):
            self.parts = WindowParts(
                n_blocks,
                n_window_blocks or 0,
                window=window,
                block_tokens=block_tokens,
                before_loss=self._keep,
            )
        self.n_shared = 0
        """Blocks held by more than one table."""

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_tokens

    @property
    def n_free(self) -> int:
        """Blocks that can be had at once: empty and cached ones."""
        return len(self._free)

    @property
    def n_held(self) -> int:
        return self.n_blocks - len(self._free)

    @property
    def n_cached(self) -> int:
        """Free blocks that hold a known prefix."""
        return self._n_cached

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def attach_prefix(self, table: BlockTable, tokens: TokenIds) -> int:
        """Gives the table the known blocks its tokens go on with; returns the tokens covered.

        Blocks it has not computed yet are given back for them. The last token is never covered: it
        must be computed, or there would be no logits.
        """
        found = self._held_known(table, tokens)
        table.n_known = table.n_registered + len(found)
        self._drop_unusable(table, found)
        if found and self.parts:
            self.parts.cover(table, range(0))
        for known in found:
            place = table.n_registered
            if place < len(table.blocks):
                self._let_go(table.blocks[place])
                table.blocks[place] = known.block
            else:
                table.blocks.append(known.block)
            table.n_registered, table.last = place + 1, known
        if found and self.parts:
            first = self.parts.first_place(table.n_registered * self.block_tokens)
            self.parts.cover(table, range(first, table.n_registered))
        return table.n_registered * self.block_tokens

    def frontier(self, table: BlockTable, tokens: TokenIds, n_tokens: int) -> Frontier | None:
        """The first of the full blocks of n_tokens that nobody has computed; changes nothing."""
        parent = table.last
        n_full = n_tokens // self.block_tokens if self.prefix_reuse else 0
        for place in range(table.n_registered, n_full):
            key = self._key(table, tokens, place)
            known = self._index.find(key, parent)
            if known is None:
                return parent, key.content
            parent = known
        return None

    def longest_run(self, table: BlockTable, tokens: TokenIds) -> tuple[int, int] | None:
        """Of the known full blocks that go on from the table's, the one that begins with most of
        these tokens, and with how many of them; None if none does."""
        found = self._index.longest_run(
            table.last, table.salt, tokens, lambda prefix: self.has_part(prefix.block)
        )
        return found and (found[0].block, found[1])

    def touch(self, block: int) -> None:
        """Its content was of use: what was not goes before it."""
        if block in self._free:
            self._free.remove(block)
            self._free.push_back(block)
        if self.parts:
            self.parts.touch(block)

    def why_missing(self, table: BlockTable, tokens: TokenIds) -> Miss | None:
        """Why attach_prefix ended where it did; None when it has covered all it may."""
        at_token = table.n_registered * self.block_tokens
        if not self.prefix_reuse:
            return Miss("off", at_token)
        n_reusable = self._n_reusable(tokens)
        if table.n_registered == n_reusable:
            return None if n_reusable else Miss("too_short", 0)
        key = self._key(table, tokens, table.n_registered)
        if self._index.find(key, table.last):  # other layers have lost or never kept it
            return Miss("no_state" if self.states else "evicted", at_token)
        reason = self._index.why_missing(key, table.last)
        if reason in ("new", "differs") and not at_token and self._tier:
            reason = "fingerprint" if self._tier.has_of_others(key.content) else reason
        return Miss(reason, at_token)

    def n_known(self, table: BlockTable, tokens: TokenIds) -> int:
        """Leading tokens in blocks that are known, by their digests alone: for who chooses among
        pools. The table lends its keys, and nothing is taken."""
        n_blocks = self._n_reusable(tokens)
        if n_blocks:
            self._key(table, tokens, n_blocks - 1)
        is_unknown = lambda key: not self._index.has_digest(key)  # noqa: E731
        return bisect_left(table.keys[:n_blocks], True, key=is_unknown) * self.block_tokens

    def grow(self, table: BlockTable, n_tokens: int) -> bool:
        """Adds blocks until n_tokens fit; False, with nothing changed, if too few are free."""
        n_new = self.blocks_for(n_tokens) - len(table.blocks)
        if n_new > len(self._free):
            return False
        for _ in range(n_new):
            block = self._free.pop_front()
            self._forget(block)
            self._references[block] = 1
            table.blocks.append(block)
        return True

    def register(self, table: BlockTable, tokens: TokenIds, n_final: int) -> None:
        """Makes the full blocks of the first n_final tokens findable; those rows are computed."""
        if not self.prefix_reuse:
            return
        for place in range(table.n_registered, n_final // self.block_tokens):
            key = self._key(table, tokens, place)
            known = self._index.find(key, table.last)
            if known is not None:
                self._swap(table, place, known.block)
            elif self._index.has_digest(key):
                return  # another sequence with this hash is in the index: leave both alone
            else:
                known = Prefix(key.digest, table.last, key.content, table.blocks[place])
                self._prefixes[known.block] = known
                self._index.add(known)
            table.n_registered, table.last = place + 1, known

    def keep_state(self, table: BlockTable, n_computed: int) -> None:
        """Recurrent layers can go on from here, if it is the end of a known block."""
        is_end = n_computed == table.n_registered * self.block_tokens
        if self.states and table.last and is_end:
            self.states.keep(table.last.block, table)

    def open_window(self, table: BlockTable, n_computed: int, n_rows: int) -> None:
        """Windowed layers are about to take these rows."""
        if self.parts:
            self.parts.extend(table, n_computed + n_rows)

    def has_part(self, block: int) -> bool:
        """Whether windowed layers have the block as well."""
        return self.parts is None or self.parts.has(block)

    def slide_window(self, table: BlockTable, n_computed: int) -> None:
        """Gives back what no later row sees in windowed layers."""
        if not self.parts:
            return
        before, first = table.window, self.parts.first_place(n_computed)
        self.parts.cover(table, range(first, before.stop))
        for place in range(before.start, first):
            if self._prefixes[table.blocks[place]] is None:  # nobody can find it again
                self.parts.drop(table.blocks[place])

    def release(self, table: BlockTable) -> None:
        """Gives up all blocks, the tail first, so that the start of a prefix lives longest."""
        if self.states:
            self.states.disown(table)
        if self.parts:
            self.parts.cover(table, range(0))
        while table.blocks:
            self._let_go(table.blocks.pop())
        table.n_registered, table.last = 0, None

    def save(self) -> None:
        """Hands all known prefixes to the second tier, children before their parents."""
        if self._tier:
            self._tier.keep_all([(p, self.part(p.block)) for p in list(self._index)[::-1]])

    def is_writable(self, table: BlockTable, position: int) -> bool:
        """Whether computing `position` would touch a block of this table alone."""
        block = table.blocks[position // self.block_tokens]
        return self._references[block] == 1 and self._prefixes[block] is None

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts every invariant, given all tables that hold blocks. For tests."""
        tables = list(tables)
        holds = [0] * self.n_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block twice in one table"
            assert table.n_registered <= len(table.blocks)
            chain = table.last
            for block in reversed(table.blocks[: table.n_registered]):
                assert chain is not None
                assert chain.block == block
                assert self._prefixes[block] is chain
                chain = chain.parent
            assert chain is None, "the table's chain is longer than its registered blocks"
            for place, block in enumerate(table.blocks):
                holds[block] += 1
                assert place < table.n_registered or self._prefixes[block] is None
        assert holds == self._references, "references differ from the tables that hold blocks"
        assert all(n < 2 or self._prefixes[b] for b, n in enumerate(holds)), "shared, unregistered"
        assert sum(n > 1 for n in holds) == self.n_shared
        free = self._free.check()
        assert sorted(free) == [b for b, n in enumerate(holds) if n == 0], "free list is wrong"
        is_cached = [self._prefixes[b] is not None for b in free]
        assert is_cached == sorted(is_cached), "an empty block behind a cached one"
        assert sum(is_cached) == self._n_cached
        assert len(self._index) == sum(p is not None for p in self._prefixes)
        for prefix in self._index:
            assert self._prefixes[prefix.block] is prefix
        self._index.check()
        if self.states:
            self.states.check(tables)
            assert all(self._prefixes[b] for b in range(self.n_blocks) if self.states.has(b))
        if self.parts:
            self.parts.check(tables)
            assert not any(self.parts.has(b) for b in free if not self._prefixes[b])

    def check_window(self, table: BlockTable, n_computed: int) -> None:
        """Asserts that what the next row sees in windowed layers is there. For tests."""
        if self.parts:
            first = self.parts.first_place(n_computed)
            assert set(range(first, self.blocks_for(n_computed))) <= set(table.window)

    def _n_reusable(self, tokens: TokenIds) -> int:
        return (len(tokens) - 1) // self.block_tokens if self.prefix_reuse else 0

    def _key(self, table: BlockTable, tokens: TokenIds, place: int) -> Key:
        return self._index.key(table.keys, table.salt, tokens, place)

    def _held_known(self, table: BlockTable, tokens: TokenIds) -> list[Prefix]:
        """The known blocks the table could go on with, each held for it."""
        found: list[Prefix] = []
        parent = table.last
        for place in range(table.n_registered, self._n_reusable(tokens)):
            key = self._key(table, tokens, place)
            known = self._index.find(key, parent) or self._restored(table, parent, key, place)
            if known is None:
                break
            self._hold(known.block)
            if self.parts:
                self.parts.touch(known.block)
            found.append(known)
            parent = known
        return found

    def _drop_unusable(self, table: BlockTable, found: list[Prefix]) -> None:
        """Layers with a window can go on only where they still have all that it covers, recurrent
        ones only where their state was kept."""
        n_usable = -1
        while n_usable != len(found):
            n_usable = len(found)
            if self.states:
                while found and not self.states.has(found[-1].block):
                    self._let_go(found.pop().block)
            if self.parts and found:
                self._bring_back_parts(table, found)
                n_before = table.n_registered
                blocks = table.blocks[:n_before] + [known.block for known in found]
                n_seen = max(0, self.parts.n_usable(n_before, blocks) - n_before)
                while len(found) > n_seen:
                    self._let_go(found.pop().block)

    def _bring_back_parts(self, table: BlockTable, found: list[Prefix]) -> None:
        """From the second tier, what the window at the end of these blocks has lost. The rest of a
        block is written anew with the bytes it has."""
        assert self.parts
        n_before, n_after = table.n_registered, table.n_registered + len(found)
        first = self.parts.first_place(n_after * self.block_tokens)
        for place in range(max(first, n_before), n_after):
            known = found[place - n_before]
            if self.parts.has(known.block):
                continue
            if not self._tier or not self._tier.has(known.digest):
                return
            if not self.parts.take(known.block):
                return
            if not self._tier.restore(table.keys[: place + 1], known.block, self.part(known.block)):
                self.parts.drop(known.block)
                return

    def part(self, block: int) -> int:
        """Where windowed layers keep the block."""
        return block if self.parts is None else int(self.parts.of_block[block])

    def _restored(
        self, table: BlockTable, parent: Prefix | None, key: Key, place: int
    ) -> Prefix | None:
        """The block from the second tier, in a free block which is cached from then on."""
        if not self._tier or not self._tier.has(key.digest):
            return None
        if not self._free or self._index.has_digest(key):
            return None
        block = self._free.pop_front()
        self._forget(block)
        has_part = self.parts is None or self.parts.take(block)
        if not has_part or not self._tier.restore(table.keys[: place + 1], block, self.part(block)):
            if self.parts:
                self.parts.drop(block)
            self._free.push_front(block)
            return None
        prefix = Prefix(key.digest, parent, key.content, block)
        self._prefixes[block] = prefix
        self._index.add(prefix)
        self._free.push_back(block)
        self._n_cached += 1
        return prefix

    def _swap(self, table: BlockTable, place: int, block: int) -> None:
        own = table.blocks[place]
        if own != block:
            self._hold(block)
            table.blocks[place] = block
            if self.parts and place in table.window:
                self.parts.replace(own, block)
            self._let_go(own)

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            self._free.remove(block)
            self._n_cached -= 1  # empty blocks are taken by grow, not by reference
        self._references[block] += 1
        self.n_shared += self._references[block] == 2

    def _let_go(self, block: int) -> None:
        self._references[block] -= 1
        self.n_shared -= self._references[block] == 1
        if self._references[block] == 0:
            if self._prefixes[block] is None:
                if self.parts:
                    self.parts.drop(block)
                self._free.push_front(block)
            else:
                self._free.push_back(block)
                self._n_cached += 1

    def _keep(self, block: int) -> None:
        prefix = self._prefixes[block]
        if prefix is not None and self._tier:
            self._tier.keep(prefix, self.part(block))

    def _forget(self, block: int) -> None:
        prefix = self._prefixes[block]
        if prefix is not None:
            self._keep(block)
            if self.parts:
                self.parts.drop(block)
            if self.states:
                self.states.drop(block)
            self._index.evict(prefix)
            self._prefixes[block] = None
            self._n_cached -= 1
