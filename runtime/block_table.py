"""What the pool keeps per sequence, and what it asks of a place that keeps blocks it gave up.

Owns: BlockTable, SecondTier. Must not know: how blocks are counted (kv_blocks.py) or stored
(prefix_store.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .prefix_index import Key, Prefix

NO_STATE = -1


class SecondTier(Protocol):
    """Keeps what the pool gives up, and may give it back."""

    def has(self, digest: bytes) -> bool: ...

    def has_of_others(self, content: bytes) -> bool:
        """Whether it keeps this first block under another fingerprint."""
        ...

    def restore(self, keys: list[Key], block: int, part: int) -> bool:
        """Fills the free block with the one that ends this chain; False if it is not to be had."""
        ...

    def keep(self, prefix: Prefix, part: int) -> None:
        """Copies the prefix's block, which is still intact; without its part it was kept before.

        part: its block in windowed layers.
        """
        ...

    def keep_all(self, prefixes: list[tuple[Prefix, int]]) -> None: ...


@dataclass
class BlockTable:
    """The blocks of one sequence in order of position. Only BlockPool writes it."""

    salt: bytes = b""
    """Sequences of different salt never share blocks (tenants, adapters)."""
    blocks: list[int] = field(default_factory=list)
    n_registered: int = 0
    """Leading blocks that are known to the prefix index."""
    last: Prefix | None = None
    """The prefix that ends with block n_registered - 1."""
    n_known: int = 0
    """Leading blocks that the index knew when it was last asked, usable or not."""
    state: int = NO_STATE
    """Its slot in recurrent layers (state_slots.py)."""
    n_replays: int = 0
    """Right guesses of its last step, by which it is ahead of the state in that slot."""
    window: range = range(0)
    """Places whose parts in windowed layers it needs (window_parts.py)."""
    keys: list[Key] = field(default_factory=list)
    """Of the sequence's full blocks, as far as they were asked for; tokens never change."""
