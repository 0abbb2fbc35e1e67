"""Requests with one and the same prompt: several answers to it (n, best_of), or several askers.

Owns: who is whose twin, and what is copied between them. Must not know: rows, queues, executors.

Full blocks are shared by way of the prefix index. The block with the prompt's last token is not:
each twin goes on writing there. So it is copied once the first of them has computed it, and the
others compute the last token's row alone, which gives them their logits. The first one may have
written beyond the prompt by then; a row never sees what lies behind it, so that does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .kv_blocks import BlockPool
from .request import Request


class BlockCopy(NamedTuple):
    """To be done before the step's rows are computed."""

    request: Request
    """Whose block is filled."""
    src: int
    dst: int
    window: tuple[int, int] | None
    """From where to where in layers with a window, if they have blocks of their own."""


class Twins:
    """The running requests, by prompt."""

    def __init__(self, running: Iterable[Request]) -> None:
        self._first: dict[bytes, Request] = {}
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        self._first.setdefault(request.prompt_key, request)

    def of(self, request: Request) -> Request | None:
        """A running one whose prompt this one could take over, now or when it is computed."""
        if not request.reads_cache or request.n_output:
            return None
        twin = self._first.get(request.prompt_key)
        # The key is a hint, as it is with blocks.
        is_same = twin is not None and np.array_equal(twin.prompt, request.prompt)
        return twin if is_same else None


def tail_rows(request: Request, block_tokens: int) -> int:
    """Rows before the prompt's last one in their common block: what a copy saves."""
    return (request.n_prompt - 1) % block_tokens


def copied_tail(pool: BlockPool, twin: Request, request: Request) -> BlockCopy | None:
    """The copy that brings the request to its prompt's last token; None if there is nothing left to
    gain or to take. Its table must have its blocks by now."""
    place = (request.n_prompt - 1) // pool.block_tokens
    is_there = twin.n_computed >= twin.n_prompt and pool.has_part(twin.table, place)
    is_next = request.n_computed == place * pool.block_tokens < request.n_prompt - 1
    if not is_there or not is_next:
        return None
    n_rows = request.n_prompt - 1 - request.n_computed
    pool.open_window(request.table, request.n_computed, n_rows)
    src, dst = twin.table.blocks[place], request.table.blocks[place]
    window = None if pool.parts is None else (pool.part(src), pool.part(dst))
    return BlockCopy(request, src, dst, window)
