"""Decides how many rows each request gets in the next step.

Owns: the waiting and running lists, admission, preemption. Must not know: weights, text, sampling,
threads. Called by the engine thread alone: schedule, then commit once the rows are computed.

Policy: first come, first served. Decodes come first, so that no stream stalls; the rest of the row
budget goes to prompts in order of arrival, cut into chunks where it ends. When a decode finds no
block, the youngest running request gives up its blocks and waits again at its old place; what it
owns is recomputed later, so its output does not change.

Why every request finishes: the oldest one is never preempted for another, and `engine.submit`
refuses what would not fit the pool alone. Blocks for all owned tokens are granted at admission, and
some must be left over for those already running; a request that was just preempted therefore does
not come back only to be preempted again.

A common prefix is computed once: a waiting request whose next block a running one is about to
compute stays in the queue, holding nothing, and others may pass it. It waits for running requests
only, and those always move; when the one it follows ends or is preempted, it goes on by itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from .kv_blocks import BlockPool, Frontier
from .prefix_index import Miss
from .request import Request, Scheduled, State


class Scheduler:
    def __init__(self, pool: BlockPool, *, step_rows: int, max_running: int) -> None:
        """step_rows: most rows in a step. A running request needs one each, so it bounds them."""
        self.pool = pool
        self.step_rows = step_rows
        self.max_running = min(max_running, step_rows)
        self.waiting: list[Request] = []  # both in order of priority
        self.running: list[Request] = []
        self.n_preemptions = 0
        self.n_cached_tokens = 0
        # Who did not fit last, with how many blocks free and how many requests running.
        self._no_fit: tuple[Request, int, int] | None = None

    def add(self, request: Request) -> None:
        request.state = State.WAITING
        self._no_fit = None
        insort(self.waiting, request, key=_priority)

    def remove(self, request: Request) -> None:
        """Forgets a request in any state and frees its blocks."""
        if request.state is not State.FINISHED:
            (self.waiting if request.state is State.WAITING else self.running).remove(request)
            self.pool.release(request.table)
            request.state = State.FINISHED
            self._no_fit = None

    def schedule(self) -> list[Scheduled]:
        """Rows for the next step; empty only if there is no request."""
        self._make_room_for_decodes()
        for request in self.running:
            if request.n_pending > 1:
                self._take_known(request)
        self._admit()
        budget, granted = self.step_rows, []
        for request in sorted(self.running, key=lambda r: (r.n_pending > 1, r.priority)):
            n_rows = min(request.n_pending, budget)
            if n_rows:
                granted.append(Scheduled(request, n_rows))
            budget -= n_rows
        return granted

    def commit(self, granted: Iterable[Scheduled]) -> None:
        """The executor has computed these rows: their keys and values are final."""
        for item in granted:
            request = item.request
            request.n_computed += item.n_rows
            request.n_ever_computed = max(request.n_ever_computed, request.n_computed)
            self.pool.register(request.table, request.tokens, request.n_computed)

    def check(self) -> None:
        """Asserts every invariant. For tests."""
        assert [r.priority for r in self.waiting] == sorted(r.priority for r in self.waiting)
        assert [r.priority for r in self.running] == sorted(r.priority for r in self.running)
        assert len(self.running) <= self.max_running
        for request in self.waiting:
            assert request.state is State.WAITING
            assert not request.table.blocks
            assert request.n_computed == 0
        for request in self.running:
            assert request.state is State.RUNNING
            assert 0 <= request.n_computed < request.n_tokens <= len(request.buffer)
            n_places = len(request.table.blocks) * self.pool.block_tokens
            assert n_places >= request.n_computed, "computed tokens without a block"
        self.pool.check(request.table for request in self.running)

    def _make_room_for_decodes(self) -> None:
        """Blocks for the newest token of every running request, oldest first."""
        place = 0
        while place < len(self.running):  # preempting shortens the list from its end
            request = self.running[place]
            if self.pool.grow(request.table, request.n_tokens):
                place += 1
            else:
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.table)
        request.n_computed = 0
        request.n_preempted += 1
        self.n_preemptions += 1
        self.add(request)

    def _admit(self) -> None:
        coming = set(self._coming_blocks())
        for request in list(self.waiting):
            if len(self.running) == self.max_running:
                return
            if coming and self._next_block(request) in coming:
                continue
            if not self._fits(request):
                return
            self.waiting.remove(request)
            request.state = State.RUNNING
            insort(self.running, request, key=_priority)
            coming.update(self._coming_blocks([request]))

    def _coming_blocks(self, requests: Iterable[Request] | None = None) -> Iterator[Frontier]:
        """The block each running request computes next, where it owns all its tokens already."""
        for request in self.running if requests is None else requests:
            table, done = request.table, request.n_computed // self.pool.block_tokens
            if request.n_pending > 1 and table.n_registered == done:
                frontier = self.pool.frontier(table, request.tokens, request.n_tokens)
                if frontier:
                    yield frontier

    def _next_block(self, request: Request) -> Frontier | None:
        """The block it would compute first; None if that is the one with its last token, which
        it must compute in any case."""
        if not request.reads_cache:
            return None
        return self.pool.frontier(request.table, request.tokens, request.n_tokens - 1)

    def _take_known(self, request: Request) -> None:
        """Blocks that are known by now, its own from before a preemption or those of others."""
        if not request.reads_cache:
            return
        n_known = self.pool.attach_prefix(request.table, request.tokens)
        n_gained = max(0, n_known - request.n_computed)
        request.n_computed += n_gained
        if request.n_preempted == 0:
            request.n_cached += n_gained
            self.n_cached_tokens += n_gained

    def _fits(self, request: Request) -> bool:
        """Takes blocks for all owned tokens, cached ones first; False and none if too few."""
        n_free, n_running = self.pool.n_free, len(self.running)
        if self._no_fit and self.running:
            tried, had_free, had_running = self._no_fit
            if request is tried and n_free <= had_free and n_running >= had_running:
                return False  # nothing was freed since: do not look a long prompt up every step
        if request.reads_cache:
            self.pool.attach_prefix(request.table, request.tokens)
        n_new = self.pool.blocks_for(request.n_tokens) - len(request.table.blocks)
        # One block to spare for each running request, so that it need not preempt soon.
        if n_new + n_running > self.pool.n_free:
            self.pool.release(request.table)
            self._no_fit = (request, n_free, n_running)
            return False
        if request.n_preempted == 0:
            request.miss = self._miss(request)
        self._take_known(request)
        self.pool.grow(request.table, request.n_tokens)
        self._no_fit = None
        return True

    def _miss(self, request: Request) -> Miss | None:
        if self.pool.prefix_reuse and not request.reads_cache:
            return Miss("bypassed", 0)
        return self.pool.why_missing(request.table, request.tokens)


def _priority(request: Request) -> int:
    return request.priority
