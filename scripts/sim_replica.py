"""One engine in virtual time: the real scheduler and block pool, and a clock that costs move.

Owns: what happens between the beginning and the end of a step, as runtime/engine.py does it,
without weights, text or sampling. Must not know: other replicas, who asks, what figures mean.

While nobody waits and all running requests stream, steps are alike but for their contexts. Those
up to the next end are taken together, as a stretch; one who arrives meanwhile cuts it short at the
step then under way, so that what comes out is what single steps would give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from martlet.quant.errors import MartletError
from martlet.runtime.assembly import scheduler_for
from martlet.runtime.block_table import BlockTable
from martlet.runtime.executors import Executor
from martlet.runtime.pace import Pace
from martlet.runtime.request import Request, Scheduled
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.state_slots import STATE_EVERY
from martlet.scripts.sim_costs import Costs

MAX_RUNNING = 32  # of runtime/engine.py
GREEDY = SamplingParams()
NOBODY = cast(Any, None)  # where text and listeners would be


@dataclass
class Asked:
    """A request and what became of it; seconds of virtual time."""

    tokens: npt.NDArray[np.int32]
    """(n_prompt + n_output,) the prompt and the answer that will be given to it."""
    n_prompt: int
    at_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    n_cached: int = 0
    replica: int = 0
    turn: int = 0
    """Its place in a conversation, whose earlier texts its prompt begins with."""
    keys: BlockTable = field(default_factory=BlockTable)
    """Digests of its blocks, as far as they were asked for."""


@dataclass
class Stretch:
    """n_steps alike, of which the first takes first_s and each further one growth_s more."""

    start_s: float
    granted: list[Scheduled]
    n_streams: int
    first_s: float
    growth_s: float = 0.0
    n_steps: int = 1

    def seconds(self, n: int) -> float:
        return n * self.first_s + self.growth_s * n * (n - 1) / 2

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds(self.n_steps)


@dataclass
class Replica:
    costs: Costs
    on_end: Callable[[Asked], None]
    number: int = 0
    busy_s: float = 0.0
    n_steps: int = 0
    stretch: Stretch | None = None
    _asked: dict[Request, Asked] = field(default_factory=dict)
    _n_arrived: int = 0

    def __post_init__(self) -> None:
        self.pace = Pace()
        self.scheduler = scheduler_for(
            cast(Executor, self.costs.shape),
            self.costs.shape.vocab_size,
            max_running=MAX_RUNNING,
            step_rows=None,
            prompt_rows=self.pace.prompt_rows,
            prefix_reuse=True,
            fingerprint=b"",
            tier=None,
            state_every=STATE_EVERY,
        )

    @property
    def n_unfinished(self) -> int:
        return len(self._asked)

    def n_known(self, asked: Asked) -> int:
        """Tokens of its prompt that would be found computed."""
        return self.scheduler.pool.n_known(asked.keys, asked.tokens[: asked.n_prompt])

    def submit(self, asked: Asked) -> None:
        """Takes it in; the step under way does not see it, and the one after that does."""
        shape = self.costs.shape
        most = min(shape.context, shape.n_blocks * shape.block_tokens)
        if len(asked.tokens) > most:
            raise MartletError(f"a request of {len(asked.tokens)} tokens, of {most} at most")
        request = Request(
            id="",
            arrival=self._n_arrived,
            buffer=asked.tokens,
            n_prompt=asked.n_prompt,
            params=GREEDY,
            seed=0,
            on_event=NOBODY,
            text=NOBODY,
            table=BlockTable(),
            arrived_ns=0,
        )
        self._n_arrived += 1
        asked.replica = self.number
        self._asked[request] = asked
        self.scheduler.add(request)

    def begin(self, now_s: float) -> Stretch | None:
        """The next steps, from now on; None where there is nothing to do."""
        granted = self.scheduler.schedule()
        if not granted:
            self.stretch = None
            return None
        streams_at = [each.request.n_computed for each in granted if each.request.is_streaming]
        prompts = [
            (each.request.n_computed, each.n_rows)
            for each in granted
            if not each.request.is_streaming
        ]
        seconds = self.costs.seconds(streams_at, prompts)
        n = len(streams_at)
        self.stretch = Stretch(now_s, granted, n, seconds)
        if not prompts:
            self.stretch.growth_s = n * self.costs.alone_growth.at(n)
            self.stretch.n_steps = self._n_alike()
        return self.stretch

    def cut(self, now_s: float) -> None:
        """Somebody has arrived: no further step than the one under way."""
        stretch = self.stretch
        assert stretch is not None
        n = 1
        while n < stretch.n_steps and stretch.start_s + stretch.seconds(n) <= now_s:
            n += 1
        stretch.n_steps = n

    def end(self) -> None:
        """The stretch is over: its tokens are there."""
        stretch = self.stretch
        assert stretch is not None
        n = stretch.n_steps
        self.busy_s += stretch.seconds(n)
        self.n_steps += n
        n_prompt = sum(each.n_rows for each in stretch.granted) - stretch.n_streams
        for nth in range(n):
            if nth:  # what scheduling each of them would have done
                self.pace.prompt_rows(stretch.n_streams, 0)
                self.scheduler.n_steps += 1
            self.pace.observe(stretch.n_streams, n_prompt, stretch.first_s + nth * stretch.growth_s)
        granted = self._as_one(stretch) if n > 1 else stretch.granted
        drawing = [each.request for each in granted if each.wants_logits]
        self.scheduler.commit(granted)
        for request in drawing:
            request.n_tokens += 1
            asked = self._asked[request]
            if request.n_output == 1:
                asked.first_s, asked.n_cached = stretch.end_s, request.n_cached
            if request.is_full:
                asked.end_s = stretch.end_s
                self.scheduler.remove(request)
                del self._asked[request]
                self.on_end(asked)

    def _as_one(self, stretch: Stretch) -> list[Scheduled]:
        """The rows of all its steps, once all but the last token of each request are drawn."""
        pool, n, granted = self.scheduler.pool, stretch.n_steps, []
        for each in stretch.granted:
            request = each.request
            request.n_tokens += n - 1
            pool.grow(request.table, request.n_tokens)
            pool.open_window(request.table, request.n_computed, n)
            granted.append(Scheduled(request, n))
        return granted

    def _n_alike(self) -> int:
        """Steps up to the first end, as far as the pool has blocks for all of them."""
        pool, running = self.scheduler.pool, self.scheduler.running
        if self.scheduler.waiting or pool.states or pool.parts:
            return 1
        if not all(request.is_streaming for request in running):
            return 1  # streams are measured alone now and then, with prompts not yet computed
        most = min(len(request.buffer) - request.n_tokens for request in running)
        for n in (most, min(most, pool.block_tokens)):
            n_new = sum(pool.blocks_for(r.n_tokens + n) - len(r.table.blocks) for r in running)
            if n_new <= pool.n_free:
                return n
        return 1
