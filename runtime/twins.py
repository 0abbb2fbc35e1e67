"""Requests with one and the same prompt: several answers to it (n, best_of), or several askers.

Owns: who is whose twin. Must not know: rows, queues, executors, blocks.

While the first of them computes the prompt the others wait for all of it, and then take it over to
its last token (partial_hits.py), whose row each computes alone; that gives it its logits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .request import Request


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
