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
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from .kv_blocks import BlockPool
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
        # (free blocks, running requests) when the first waiting request last did not fit.
        self._no_fit: tuple[int, int] | None = None

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
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._fits(request):
                break
            self.waiting.remove(request)
            request.state = State.RUNNING
            insort(self.running, request, key=_priority)

    def _fits(self, request: Request) -> bool:
        """Takes blocks for all owned tokens, cached ones first; False and none if too few."""
        now = (self.pool.n_free, len(self.running))
        if (
            self._no_fit
            and self.running
            and now[0] <= self._no_fit[0]
            and now[1] >= self._no_fit[1]
        ):
            return False  # nothing was freed since: do not hash a long prompt again in every step
        n_cached = self.pool.attach_prefix(request.table, request.tokens)
        n_new = self.pool.blocks_for(request.n_tokens) - len(request.table.blocks)
        # One block to spare for each running request, so that it need not preempt soon.
        if n_new + len(self.running) > self.pool.n_free:
            self.pool.release(request.table)
            self._no_fit = now
            return False
        self.pool.grow(request.table, request.n_tokens)
        request.n_computed = n_cached
        if request.n_preempted == 0:
            request.n_cached = n_cached
        self._no_fit = None
        return True


def _priority(request: Request) -> int:
    return request.priority
