"""Whether a model fits into the memory that is free: with a packed copy of its weights, without
one, or not at all.

Owns: that choice and the refusal, before the system ends a process for what it has been promised.
Must not know: how free memory is found out, files, what a plan means.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import NotEnoughMemory
from .estimate import arena_bytes, late_bytes, weight_bytes
from .machine import Memory
from .plan import Plan

# What requests take beside their keys and values: texts, grammars, answers, the server's buffers.
REQUEST_BYTES = 32 << 20


@dataclass(frozen=True)
class Need:
    """What a loaded model takes beside the mapped file. Bytes."""

    packed_bytes: int
    """With a packed copy of all weights."""
    raw_bytes: int
    """Without one."""

    def __add__(self, other: Need) -> Need:
        return Need(self.packed_bytes + other.packed_bytes, self.raw_bytes + other.raw_bytes)

    def beside(self, shared_bytes: int) -> Need:
        """Where so much of the packed copy is in memory already."""
        return Need(self.packed_bytes - shared_bytes, self.raw_bytes)


def need_of(
    plan: Plan, pool_bytes: int, pool_tokens: int, n_threads: int, mmap_experts: bool = False
) -> Need:
    """pool_bytes: of keys and values with the states of recurrent layers."""
    late = late_bytes(plan) if mmap_experts else 0
    packed, raw = (
        pool_bytes + weight_bytes(plan, repack) + arena_bytes(plan, pool_tokens, n_threads, repack)
        for repack in (True, False)
    )
    return Need(packed - late, raw)


def choose_repack(
    need: Need, found: Memory, repack: bool | None, *, file_bytes: int
) -> tuple[bool, str]:
    """Whether to keep a packed copy, and why not where nobody asked; repack: what was asked for.
    Raises NotEnoughMemory. Memory that the system does not tell is not run short of."""
    free = found.available_bytes
    packed, raw = need.packed_bytes + REQUEST_BYTES, need.raw_bytes + REQUEST_BYTES
    chosen = (packed <= free or not found.total_bytes) if repack is None else repack
    needed = packed if chosen else raw
    if found.total_bytes and needed > found.most_bytes:
        raise NotEnoughMemory(
            f"{needed} bytes of memory are needed, {found.most_bytes} are available; "
            + ("ask for --no-repack, " if chosen else "ask for ")
            + "a smaller --kv-bytes or a shorter --context, or take a model of fewer bits",
            needed_bytes=needed,
            available_bytes=found.most_bytes,
        )
    if chosen or repack is not None:
        return chosen, ""
    why = (
        "weights are read from the file, as with --no-repack, which is slower: a packed copy "
        f"takes {(packed - raw) / 1e6:,.0f} MB, which makes {packed / 1e6:,.0f}, and "
        f"{free / 1e6:,.0f} are free"
    )
    if raw + file_bytes > free:
        why += (
            f"; the {file_bytes / 1e6:,.0f} MB of the file do not fit beside the rest either, and "
            "are read from the disk again and again"
        )
    return False, why
