"""Decides how many rows each request gets in the next step.

Owns: the waiting and running lists, admission, preemption. Must not know: weights, text, sampling,
threads. Called by the engine thread alone: schedule, then commit once the rows are computed.

Policy: requests go by their place in line (service.py). Decodes come first, so that no stream
stalls; the rest of the row budget goes to prompts, cut into chunks where it ends: to interactive
ones first, but in one step of EVERY to background ones first. When a decode finds no block, the
running request with the last place gives up its blocks and waits again at its old place; what it
owns is recomputed later, so its output does not change.

Why every request finishes: the one with the first place is never preempted for another, and
`engine.submit` refuses what would not fit the pool alone. Blocks for all owned tokens are granted
at admission, and some must be left over for those already running; a request that was just
preempted therefore does not come back only to be preempted again. Background requests leave a
quarter of the running places free, so that an interactive one need not wait for a long batch.

A common prefix is computed once: a waiting request whose next block a running one is about to
compute stays in the queue, holding nothing, and others may pass it. It waits for running requests
only, and those always move; when the one it follows ends or is preempted, it goes on by itself. It
waits for none of a worse class; if it overtakes one, that one takes the blocks as they are done.
One with the very prompt of a running one waits for all of it (twins.py). Where the known blocks
end, the equal start of the next one is copied (partial_hits.py), at once: nothing else can happen
to its source before. Where recurrent layers need a snapshot, a prompt's chunk ends (marks.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from .kv_blocks import BlockPool, Frontier
from .marks import common_blocks, is_mark, next_mark, rows_before_mark
from .partial_hits import miss_after, partial_hit
from .prefix_index import Miss
from .request import Request, Scheduled, State
from .service import Line, Place, favoured
from .twins import Twins, tail_rows

Coming = tuple[Frontier | None, int]
"""The block that a running request computes next, and the request's class."""
CopyBlock = Callable[[int, int, tuple[int, int] | None], None]


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        step_rows: int,
        max_running: int,
        prompt_rows: Callable[[int, int], int] | None = None,
        scored_rows: int | None = None,
        whole_prompts: bool = False,
        copy_block: CopyBlock = lambda src, dst, window: None,
    ) -> None:
        """step_rows: most rows in a step. A running request needs one each, so it bounds them.
        prompt_rows: most rows of prompts beside so many streams, when so many prompts could be
        finished in one step (see pace.py). scored_rows: most of them whose logits are read.
        whole_prompts: all rows of a prompt are computed in one step, or none.
        copy_block: the executor's; between steps.
        """
        self.pool = pool
        self._prompt_rows = prompt_rows or (lambda n_streams, n_short: step_rows)
        self.step_rows = step_rows
        self.scored_rows = scored_rows or step_rows
        self.whole_prompts = whole_prompts
        self.max_running = min(max_running, step_rows)
        self.max_background = max(1, self.max_running * 3 // 4)
        self.waiting: list[Request] = []  # both in order of place
        self.running: list[Request] = []
        self.n_preemptions = 0
        self.n_cached_tokens = 0
        self.n_steps = 0
        self._copy_block = copy_block
        self._line = Line()
        # Who did not fit last, with how many blocks free and how many requests running.
        self._no_fit: tuple[Request, int, int] | None = None

    def add(self, request: Request) -> None:
        request.state = State.WAITING
        request.place = request.place or self._line.place(request.service, request.arrival)
        self._no_fit = None
        insort(self.waiting, request, key=_place)

    def remove(self, request: Request) -> None:
        """Forgets a request in any state and frees its blocks."""
        if request.state is not State.FINISHED:
            (self.waiting if request.state is State.WAITING else self.running).remove(request)
            self.pool.release(request.table)
            request.state = State.FINISHED
            self._no_fit = None

    def unfinished(self) -> list[Request]:
        return self.running + self.waiting

    def fragmentation(self) -> float:
        """Slots of held blocks over the tokens in them; 1 while none is held. From any thread."""
        size, n_empty = self.pool.block_tokens, 0
        for request in tuple(self.running):
            n_empty += max(0, len(request.table.blocks) * size - request.n_tokens)
        n_slots = self.pool.n_held * size
        return n_slots / max(n_slots - n_empty, 1) if n_slots else 1.0

    def schedule(self) -> list[Scheduled]:
        """Rows for the next step; empty only if there is no request."""
        self._make_room_for_decodes()
        for request in self.running:
            if request.n_pending > 1:
                self._take_known(request)
        self._admit()
        n_streams = sum(request.is_streaming for request in self.running)
        n_short = sum(not r.n_output and self._is_short(r) for r in self.running)
        budget = min(self.step_rows, n_streams + self._prompt_rows(n_streams, n_short))
        if self.whole_prompts:  # nobody streams beside them
            budget = self.step_rows
        n_scored, granted, first = self.scored_rows, [], favoured(self.n_steps)
        self.n_steps += 1
        # A stable sort: places stay in order inside each group.
        for request in sorted(self.running, key=lambda r: (not r.is_streaming, r.service != first)):
            n_rows = min(request.n_pending, budget)
            if self.whole_prompts and n_rows < request.n_pending:
                continue  # the next step is its own, or that of those before it
            if self.pool.states:
                states = self.pool.states
                n_rows = min(n_rows, next_mark(request, self.pool.block_tokens, states.every))
            if request.scores is not None and not request.is_streaming:
                n_rows = min(n_rows, n_scored)
                n_scored -= n_rows
            if n_rows:
                granted.append(Scheduled(request, n_rows))
            budget -= n_rows
        for item in granted:
            self.pool.open_window(item.request.table, item.request.n_computed, item.n_rows)
        return granted

    def lengthen(self, item: Scheduled, tokens: Sequence[int]) -> Scheduled:
        """With rows for tokens that the request may come to own in this step, or for the first of
        them; as it is where blocks are short. Each running request keeps one that it may need."""
        request, table, states = item.request, item.request.table, self.pool.states
        if states:
            n_before = rows_before_mark(request, self.pool.block_tokens, states.every)
            tokens = tokens[: min(states.n_guesses, n_before)]
        n = len(tokens)
        n_new = self.pool.blocks_for(request.n_tokens + n) - len(table.blocks)
        if not n or n_new + len(self.running) * (n_new > 0) > self.pool.n_free:
            return item
        self.pool.grow(table, request.n_tokens + n)
        request.buffer[request.n_tokens : request.n_tokens + n] = tokens
        self.pool.open_window(table, request.n_computed, item.n_rows + n)
        return Scheduled(request, item.n_rows + n, n)

    def accept(self, request: Request) -> None:
        """It owns one more token whose row the last step has computed already."""
        if self.pool.states:
            self.pool.states.goes_ahead(request.table)
        self._computed(request, 1)

    def _is_short(self, request: Request) -> bool:
        """One step could compute the part of its prompt that was not known."""
        return request.n_prompt - request.n_cached <= self.step_rows

    def commit(self, granted: Iterable[Scheduled]) -> None:
        """The executor has computed these rows: keys and values of owned tokens are final."""
        for item in granted:
            if self.pool.states:
                self.pool.states.caught_up(item.request.table)
            self._computed(item.request, item.n_owned)

    def _computed(self, request: Request, n_rows: int) -> None:
        request.n_computed += n_rows
        request.n_ever_computed = max(request.n_ever_computed, request.n_computed)
        self.pool.register(request.table, request.tokens, request.n_computed)
        states = self.pool.states
        if states and is_mark(request, self.pool.block_tokens, states.every):
            self.pool.keep_state(request.table, request.n_computed)
        self.pool.slide_window(request.table, request.n_computed)

    def check(self) -> None:
        """Asserts every invariant. For tests."""
        for requests in (self.waiting, self.running):
            places = [_place(r) for r in requests]
            assert places == sorted(places)
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
        for request in self.running:
            self.pool.check_window(request.table, request.n_computed)

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
        if not self.waiting:
            return
        coming = {self._coming_block(request): request for request in self.running}
        twins = Twins(self.running if self.pool.prefix_reuse else ())
        for request in list(self.waiting):
            if len(self.running) == self.max_running:
                return
            twin = twins.of(request)
            if self._has_its_share(request) or self._is_coming(request, coming):
                continue
            if twin and self._is_worth_waiting_for(twin, request):
                continue
            if not self._fits(request):
                return
            self._copy_start(request)
            self.waiting.remove(request)
            request.state = State.RUNNING
            insort(self.running, request, key=_place)
            self._line.admit(_place(request))
            coming.setdefault(self._coming_block(request), request)
            if self.pool.prefix_reuse:
                twins.add(request)

    def _has_its_share(self, request: Request) -> bool:
        if request.service == "interactive":
            return False
        return sum(r.service == request.service for r in self.running) >= self.max_background

    def _coming_block(self, request: Request) -> Coming:
        """The block a running request computes next, if it owns all its tokens; and its class."""
        frontier, table = None, request.table
        is_found_by_others = table.n_registered == request.n_computed // self.pool.block_tokens
        if request.n_pending > 1 and is_found_by_others:
            frontier = self.pool.frontier(table, request.tokens, request.n_tokens)
        return frontier, _place(request).rank

    def _is_coming(self, request: Request, coming: Mapping[Coming, Request]) -> bool:
        """Whether a running request is about to compute what this one would compute first.

        Its block with the last token does not count: it computes that in any case.
        """
        if not request.reads_cache or not coming:
            return False
        wanted = self.pool.frontier(request.table, request.tokens, request.n_tokens - 1)
        if wanted is None:
            return False
        for rank in range(_place(request).rank + 1):
            if other := coming.get((wanted, rank)):
                if self.pool.states:
                    other.marks.add(common_blocks(request, other, self.pool.block_tokens))
                return True
        return False

    def _is_worth_waiting_for(self, twin: Request, request: Request) -> bool:
        is_coming = twin.n_computed < twin.n_prompt and _place(twin).rank <= _place(request).rank
        return is_coming and tail_rows(request, self.pool.block_tokens) > 0

    def _copy_start(self, request: Request) -> None:
        """Of the block behind its known ones, what others have computed."""
        if not request.reads_cache or not self.pool.prefix_reuse or self.pool.states:
            return
        if hit := partial_hit(self.pool, self.running, request):
            self._copy_block(hit.src, hit.dst, hit.window)
            self._gain(request, request.n_computed + hit.n_tokens)
            self.pool.slide_window(request.table, request.n_computed)
            if request.n_preempted == 0:
                request.miss = miss_after(hit, request.miss, request)

    def _take_known(self, request: Request) -> None:
        """Blocks that are known by now, its own from before a preemption or those of others."""
        if not request.reads_cache:
            return
        self._gain(request, self.pool.attach_prefix(request.table, request.tokens))

    def _gain(self, request: Request, n_known: int) -> None:
        n_gained = max(0, n_known - request.n_computed)
        if n_gained and self.pool.states and request.table.last:
            self.pool.states.go_on_from(request.table.last.block, request.table)
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
        if not self._has_window_room(request):
            self._no_fit = (request, n_free, n_running)
            return False
        if self.pool.states:  # before a snapshot is chosen: its slot might be the one to take
            was_owned = self.pool.states.own(request.table)
            assert was_owned, "more requests run than there are slots for their states"
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
        if self.pool.states:
            request.marks.add(request.table.n_known * self.pool.block_tokens)
        self._take_known(request)
        self.pool.grow(request.table, request.n_tokens)
        self._no_fit = None
        return True

    def _has_window_room(self, request: Request) -> bool:
        parts = self.pool.parts
        if parts is None:
            return True
        n_shares = sum(parts.share(len(r.buffer)) for r in [*self.running, request])
        return not self.running or parts.fits(n_shares, self.step_rows)

    def _miss(self, request: Request) -> Miss | None:
        if self.pool.prefix_reuse and not request.reads_cache:
            return Miss("bypassed", 0)
        return self.pool.why_missing(request.table, request.tokens)


def _place(request: Request) -> Place:
    assert request.place is not None, "the request was never added"
    return request.place
