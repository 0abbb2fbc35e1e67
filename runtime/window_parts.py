"""Where layers with a window keep keys and values: a part for some of the pool's blocks.

Owns: which block has a part, which tables need it, which parts are given up first. Must not know:
prefixes, references, requests.

Such a layer never looks back beyond its window, so it needs a sequence's last blocks alone. A block
has its part in these layers from the step that first writes it, is held on to while the window of a
table covers it, and stays, as part of a known prefix, until the part is wanted for another block.

There are fewer parts than blocks, and still none is ever missing: a table needs at most its share,
a step's new rows need a little more, and the scheduler lets no more requests run than fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from .block_table import BlockTable
from .errors import ModelError

NONE = -1


class WindowParts:
    def __init__(
        self,
        n_blocks: int,
        n_parts: int,
        *,
        window: int,
        block_tokens: int,
        before_loss: Callable[[int], None] = lambda block: None,
    ) -> None:
        """window: positions that a row sees, itself included. before_loss is told of the block
        whose part is about to be taken for another one."""
        if not 0 < n_parts <= n_blocks or window < 1:
            raise ModelError(f"{n_parts} window blocks of {n_blocks}, window {window}: none fits")
        self.n_parts, self.window = n_parts, window
        self.of_block: npt.NDArray[np.int32] = np.full(n_blocks, NONE, np.int32)
        """The part of each block."""
        self._block_tokens = block_tokens
        self._before_loss = before_loss
        self._needs = [0] * n_blocks  # tables whose window covers the block
        self._empty = list(range(n_parts))[::-1]
        self._unneeded: OrderedDict[int, None] = OrderedDict()  # blocks; longest unneeded first

    @property
    def n_needed(self) -> int:
        return self.n_parts - len(self._empty) - len(self._unneeded)

    # ---- how many are enough ---------------------------------------------------------------------

    def share(self, n_tokens: int) -> int:
        """Parts that a sequence of so many tokens may need, but for the rows of a step."""
        longest = window_blocks(self.window, self._block_tokens)
        return min(-(-n_tokens // self._block_tokens), longest)

    def fits(self, n_shares: int, step_rows: int) -> bool:
        """Whether tables with so many parts together never miss one."""
        if self.n_parts == len(self.of_block):
            return True  # one for every block
        return n_shares + -(-step_rows // self._block_tokens) <= self.n_parts

    # ---- what a table needs ----------------------------------------------------------------------

    def first_place(self, n_computed: int) -> int:
        """The first block that the row at this position, or any later one, looks at."""
        return max(0, n_computed - self.window + 1) // self._block_tokens

    def cover(self, table: BlockTable, places: range) -> None:
        """These of the table's blocks are needed from now on, and no others of it; they have their
        parts."""
        before, table.window = table.window, places
        if before == places:
            return
        for place in places:
            if place not in before:
                self._need(table.blocks[place])
        for place in reversed(before):
            if place not in places:
                self._need_no_more(table.blocks[place])

    def extend(self, table: BlockTable, n_tokens: int) -> None:
        """Gives parts to the blocks up to this many tokens that have none, for rows to come."""
        places = range(table.window.start, -(-n_tokens // self._block_tokens))
        if places.stop <= table.window.stop:
            return
        for place in range(table.window.stop, places.stop):
            if not self.has(table.blocks[place]):
                was_taken = self.take(table.blocks[place])
                assert was_taken, "more requests run than there are window blocks for"
            self._need(table.blocks[place])  # or the next one might take it
        table.window = places

    def n_usable(self, places: int, blocks: Iterable[int]) -> int:
        """How many of the places stand at the end of a window whose blocks all have parts.

        blocks: of all places from the first on. Returns the last such place's number, 0 for none.
        """
        best = run = 0
        for n, block in enumerate(blocks, 1):
            run = run + 1 if self.has(block) else 0
            if n - self.first_place(n * self._block_tokens) <= run:
                best = n
        return best if best > places else 0

    # ---- a block and its part --------------------------------------------------------------------

    def has(self, block: int) -> bool:
        return bool(self.of_block[block] != NONE)

    def take(self, block: int) -> bool:
        """A part for the block, which nobody needs so far; False if all parts are needed."""
        if not self._empty:
            if not self._unneeded:
                return False
            oldest = next(iter(self._unneeded))
            self._before_loss(oldest)
            self.drop(oldest)
        self.of_block[block] = self._empty.pop()
        self._unneeded[block] = None
        return True

    def touch(self, block: int) -> None:
        if block in self._unneeded:
            self._unneeded.move_to_end(block)

    def drop(self, block: int) -> None:
        """The block is empty, or its part is wanted elsewhere."""
        if self.has(block):
            del self._unneeded[block]
            self._empty.append(int(self.of_block[block]))
            self.of_block[block] = NONE

    def replace(self, old: int, new: int) -> None:
        """A table has taken `new` for its own block `old` of equal content, and needs its part."""
        if self.has(new):
            self._need(new)
            self._need_no_more(old)
        else:
            self.of_block[new], self.of_block[old] = self.of_block[old], NONE
            self._needs[new], self._needs[old] = self._needs[old], 0

    def _need(self, block: int) -> None:
        assert self.has(block), f"block {block} is in a window and has no part"
        self._unneeded.pop(block, None)
        self._needs[block] += 1

    def _need_no_more(self, block: int) -> None:
        self._needs[block] -= 1
        if not self._needs[block]:
            self._unneeded[block] = None

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts every invariant, given all tables that hold blocks. For tests."""
        needs = [0] * len(self.of_block)
        for table in tables:
            for place in table.window:
                needs[table.blocks[place]] += 1
        assert needs == self._needs, "needs differ from the tables' windows"
        held = [int(part) for part in self.of_block if part != NONE]
        assert sorted(held + self._empty) == list(range(self.n_parts)), "a part is lost or double"
        unneeded = {b for b, n in enumerate(needs) if not n and self.has(b)}
        assert unneeded == set(self._unneeded)
        assert all(self.has(b) for b, n in enumerate(needs) if n)


def parts_of_pool(
    n_blocks: int, blocks_per_context: int, window: int, block_tokens: int, step_rows: int
) -> int:
    """For the contexts that the pool holds: their windows, a step's rows, and for the ends of
    known prefixes an eighth of what whole contexts would take."""
    if not window:
        return n_blocks
    n_contexts = -(-n_blocks // blocks_per_context)
    shares = n_contexts * window_blocks(window, block_tokens)
    return min(n_blocks, shares + -(-step_rows // block_tokens) + n_blocks // 8)


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks that a sequence needs in windowed layers, but for the rows of a step: wherever the
    window begins inside its first block, and the one that the next row may begin."""
    return (window + block_tokens - 2) // block_tokens + 2
