"""Where recurrent layers keep what they know of a sequence: one slot for all of them together.

Owns: which table has which slot, which known prefixes have a snapshot, which snapshots are given up
first. Must not know: what is in a slot, prefixes, requests.

Such a layer (a delta rule, a scan, a short convolution) has no keys and values to go back to: its
state is that of one position, the last one computed. A running sequence owns a slot. To go on from
a known prefix it needs a copy made exactly where the prefix ends, a snapshot. Snapshots fill the
slots that no sequence owns; the one of no use for longest gives way.

Nor can a state take tokens back. So behind a step with guesses it is that before them, and what
layers have read of the guesses is kept beside it (Executor.n_guesses); those that were right are
put into it by the sequence's next step. Until then the sequence is ahead of its state by n_replays
tokens, and there is no snapshot to be had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from .block_table import NO_STATE, BlockTable
from .errors import ModelError
from .step import MOST_GUESSES

CopyState = Callable[[int, int], None]
STATE_EVERY = 1024
"""Tokens of a long prompt between snapshots; a multiple of any block's."""
SPARE_STATES = 8
"""Slots for snapshots, beside those of the sequences that run."""


class StateSlots:
    def __init__(
        self,
        n_slots: int,
        copy_state: CopyState,
        every: int = STATE_EVERY,
        n_guesses: int = MOST_GUESSES,
    ) -> None:
        """copy_state: the executor's, from slot to slot; between steps. every: tokens of a long
        text between snapshots. n_guesses: rows of a step that can be taken back."""
        if n_slots < 1:
            raise ModelError(f"{n_slots} slots for the states of sequences; at least 1")
        self.n_slots, self.every, self.n_guesses = n_slots, every, n_guesses
        self._copy = copy_state
        self._empty = list(range(n_slots))[::-1]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # block -> slot; oldest use first

    @property
    def n_owned(self) -> int:
        """Slots of running sequences: no new one can be had once these are all."""
        return self.n_slots - len(self._empty) - len(self._snapshots)

    @property
    def n_snapshots(self) -> int:
        return len(self._snapshots)

    # ---- of a sequence ---------------------------------------------------------------------------

    def own(self, table: BlockTable) -> bool:
        """A slot for the sequence, whatever is in it; False if others own all of them."""
        if table.state == NO_STATE and self._has_room():
            table.state = self._empty.pop()
        return table.state != NO_STATE

    def disown(self, table: BlockTable) -> None:
        if table.state != NO_STATE:
            self._empty.append(table.state)
            table.state, table.n_replays = NO_STATE, 0

    def caught_up(self, table: BlockTable) -> None:
        """A step has computed rows of the sequence: its state is that behind them."""
        table.n_replays = 0

    def goes_ahead(self, table: BlockTable) -> None:
        """A guess of that step was right."""
        table.n_replays += 1

    # ---- of a block: the state behind its last token ---------------------------------------------

    def has(self, block: int) -> bool:
        return block in self._snapshots

    def keep(self, block: int, table: BlockTable) -> None:
        """The sequence is just behind this block: its state is kept, if there is room."""
        assert not table.n_replays, "its state is that of an earlier token"
        if block not in self._snapshots and self._has_room():
            slot = self._empty.pop()
            self._copy(table.state, slot)
            self._snapshots[block] = slot
        self._touch(block)

    def go_on_from(self, block: int, table: BlockTable) -> None:
        """The sequence goes on behind this block, which has a snapshot."""
        self._copy(self._snapshots[block], table.state)
        self._touch(block)

    def drop(self, block: int) -> None:
        """The block ends no known prefix any more."""
        if block in self._snapshots:
            self._empty.append(self._snapshots.pop(block))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that every slot has one owner. For tests."""
        owned = [table.state for table in tables if table.state != NO_STATE]
        slots = [*owned, *self._snapshots.values(), *self._empty]
        assert sorted(slots) == list(range(self.n_slots)), "a slot is lost or has two owners"

    def _touch(self, block: int) -> None:
        if block in self._snapshots:
            self._snapshots.move_to_end(block)

    def _has_room(self) -> bool:
        """Whether a slot is empty, or was made so."""
        if not self._empty and self._snapshots:
            self._empty.append(self._snapshots.popitem(last=False)[1])
        return bool(self._empty)
