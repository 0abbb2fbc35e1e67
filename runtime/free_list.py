"""The free blocks of a pool, as a doubly linked list inside two arrays.

Owns: order and membership. Must not know: why a block is put in front or at the back (kv_blocks).
A prefix hit takes a block out of the middle; with links that is O(1), with a deque it is linear.
"""

from __future__ import annotations

NOT_IN_LIST = -1


class FreeList:
    """Numbers 0 … n_blocks - 1, all in the list at first, in order."""

    def __init__(self, n_blocks: int) -> None:
        # Place n_blocks is the sentinel: the list is a ring through it, so no end is special.
        self._sentinel = n_blocks
        self._next = [*range(1, n_blocks + 1), 0]
        self._previous = [n_blocks, *range(n_blocks)]
        self._length = n_blocks

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != NOT_IN_LIST

    def push_front(self, block: int) -> None:
        self._insert_after(self._sentinel, block)

    def push_back(self, block: int) -> None:
        self._insert_after(self._previous[self._sentinel], block)

    def pop_front(self) -> int:
        block = self._next[self._sentinel]
        if block == self._sentinel:
            raise IndexError("pop from an empty free list")
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        assert block in self, f"block {block} is not free"
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = NOT_IN_LIST
        self._length -= 1

    def check(self) -> list[int]:
        """The blocks from front to back, after asserting that the links agree in both ways."""
        found, at = [], self._next[self._sentinel]
        while at != self._sentinel:
            assert self._next[self._previous[at]] == at
            assert self._previous[self._next[at]] == at
            found.append(at)
            assert len(found) <= self._length, "the list is longer than its length"
            at = self._next[at]
        assert len(found) == self._length, "the list is shorter than its length"
        linked = [block for block in range(self._sentinel) if block in self]
        assert sorted(found) == linked, "a block has links but is not in the list"
        return found

    def _insert_after(self, place: int, block: int) -> None:
        assert block not in self, f"block {block} is free already"
        after = self._next[place]
        self._next[place] = self._previous[after] = block
        self._previous[block], self._next[block] = place, after
        self._length += 1
