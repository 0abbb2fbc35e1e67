"""Where a request's known prefix ends inside a block: the start that the block has in common with
another one is copied, and not computed.

Owns: from which block, and how much of it. Must not know: rows, queues, executors.

Full blocks are shared by way of the prefix index, and are never written again. But a system prompt
seldom ends where a block does, and of equal prompts each goes on writing behind the last token. So
the request gets a block of its own there, filled with the block, of the known ones and of those
that others are writing, that goes on with most of its tokens. What lies in it behind them is never
seen: a row looks at none behind its own, and each is written before a later one looks at it.
The prompt's last token is not copied: its row gives the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .kv_blocks import BlockPool
from .prefix_index import Miss, TokenIds
from .request import Request


class PartialHit(NamedTuple):
    src: int
    dst: int
    """The request's own block; nobody else has it."""
    window: tuple[int, int] | None
    """From where to where in layers with a window, if they have blocks of their own."""
    n_tokens: int
    """Known by the copy. At least 1, and fewer than the request owns from there on."""
    differs: bool
    """The source goes on with another token, and does not merely end there."""


class _Source(NamedTuple):
    n_tokens: int
    block: int
    differs: bool


def partial_hit(pool: BlockPool, running: Iterable[Request], request: Request) -> PartialHit | None:
    """What the request can copy behind its known blocks; it has its own blocks by now, and has
    computed none. None if nobody goes on with its next token, or only its last one is next."""
    table, start = request.table, request.n_computed
    assert start == table.n_registered * pool.block_tokens
    wanted = request.tokens[start : min(start + pool.block_tokens, request.n_tokens - 1)]
    if not len(wanted):
        return None
    sources = [_of_running(pool, other, request, wanted) for other in running]
    if known := pool.longest_run(table, wanted):
        block, n_tokens = known
        sources.append(_Source(n_tokens, block, differs=n_tokens < len(wanted)))
    best = max((s for s in sources if s), default=None)
    if best is None:
        return None
    pool.touch(best.block)
    pool.open_window(table, start, best.n_tokens)
    # Its part was touched last, and more are spare: the scheduler left room for a step's rows.
    assert pool.has_part(best.block), "the window that was opened took the source's part"
    dst = table.blocks[table.n_registered]
    window = None if pool.parts is None else (pool.part(best.block), pool.part(dst))
    return PartialHit(best.block, dst, window, best.n_tokens, best.differs)


def _of_running(
    pool: BlockPool, other: Request, request: Request, wanted: TokenIds
) -> _Source | None:
    """The block that another request writes behind the same known ones."""
    start, theirs, ours = request.n_computed, other.table, request.table
    if theirs.last is not ours.last or theirs.salt != ours.salt or other.n_computed <= start:
        return None
    block = theirs.blocks[ours.n_registered]
    if not pool.has_part(block):
        return None
    computed = other.tokens[start : min(start + len(wanted), other.n_computed)]
    is_equal = computed == wanted[: len(computed)]
    n_tokens = len(computed) if is_equal.all() else int(np.argmin(is_equal))
    return _Source(n_tokens, block, n_tokens < len(computed)) if n_tokens else None


def miss_after(hit: PartialHit, miss: Miss | None, request: Request) -> Miss | None:
    """Why the whole hit ended, given why full blocks did."""
    if miss is None or request.n_computed == request.n_tokens - 1:
        return None
    reason = miss.reason
    if reason in ("new", "too_short", "differs"):
        reason = "differs" if hit.differs else "new"
    return Miss(reason, request.n_computed)
