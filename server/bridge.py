"""Carries a request's events from the engine thread to the event loop, and its end back.

Owns: Job (all engine requests behind one HTTP request), waiting with limits, cancelling what the
client left. Must not know: HTTP shapes, text, metrics beyond the one observer it calls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..runtime.constraint import Constraint
from ..runtime.events import Event, FinishEvent
from ..runtime.sampling_params import SamplingParams
from ..runtime.service import Service


class EngineLike(Protocol):
    """The part of runtime.engine.Engine the server talks to."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: Callable[[Event], None],
        *,
        request_id: str | None = None,
        service: Service = "interactive",
        deadline_ms: float | None = None,
        cache_salt: bytes = b"",
        constraint: Constraint | None = None,
        show_ids: frozenset[int] = frozenset(),
        arrived_ns: int | None = None,
        adapters: Mapping[int, float] | None = None,
        second_at: int | None = None,
    ) -> Any: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> Any: ...

    @property
    def is_alive(self) -> bool: ...


class Terms(NamedTuple):
    """How an engine request is to be served."""

    service: Service = "interactive"
    deadline_ms: int | None = None
    cache_salt: bytes = b""
    """Prompts of different salts never share what was computed for them."""
    show_ids: frozenset[int] = frozenset()
    """Control tokens that appear in the text."""
    adapters: Mapping[int, float] | None = None
    """How much of which adapter, by number; None: what the server gives all."""


class Ask(NamedTuple):
    """One engine request to be: a prompt and how to continue it."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    terms: Terms = Terms()
    constraint: Constraint | None = None
    """This request's own: it remembers what was drawn."""
    second_at: int | None = None
    """Where the second of two texts begins, of which the prompt consists."""


@dataclass(frozen=True)
class Arrival:
    """An event of the job's request number `index`."""

    index: int
    event: Event


@dataclass(frozen=True)
class Patience:
    """How long to wait for the engine, in seconds."""

    ping_s: float
    """Between signs of life for the client while nothing arrives; 0: none."""
    stall_s: float
    """Without any movement in the engine's own counters it is taken for dead."""


class EngineStalled(Exception):
    """The engine shows no movement at all."""

    code = "engine_stalled"


class SlowReader(Exception):
    """The client has left more events unread than are kept for it."""

    code = "slow_reader"


class Courier:
    """Takes events to event loops, all that are ready at once in one trip.

    Waking a loop costs a system call and a switch of threads. The loops that servers run on
    (uvloop) are woken without giving up the interpreter, so the engine thread goes on to its next
    step, and the loop has its turn while the executor runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bags: dict[asyncio.AbstractEventLoop, list[tuple[Job, Arrival]]] = {}

    def send(self, job: Job, arrival: Arrival) -> None:
        """From any thread."""
        with self._lock:
            bag = self._bags.setdefault(job.loop, [])
            bag.append((job, arrival))
            if len(bag) > 1:
                return
        try:
            job.loop.call_soon_threadsafe(self._hand_over, job.loop)
        except RuntimeError:  # a loop that closed meanwhile has nobody left to tell
            self._take(job.loop)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        for job, arrival in self._take(loop):
            job.arrive(arrival)

    def _take(self, loop: asyncio.AbstractEventLoop) -> list[tuple[Job, Arrival]]:
        with self._lock:
            return self._bags.pop(loop, [])


class Job:
    """The engine requests of one HTTP request. Whoever makes one calls `cancel` in the end."""

    def __init__(
        self,
        engine: EngineLike,
        job_id: str,
        observe: Callable[[int, Event], None] = lambda index, event: None,
        courier: Courier | None = None,
        max_unread: int = 4096,
        arrived_ns: int | None = None,
    ) -> None:
        """arrived_ns: of time.monotonic_ns, when the HTTP request came; None for now."""
        self.job_id = job_id
        self._max_unread = max_unread
        self._arrived_ns = time.monotonic_ns() if arrived_ns is None else arrived_ns
        self._is_overrun = False
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._observe = observe
        self._courier = courier or Courier()
        self._arrivals: list[Arrival] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._unfinished: dict[int, str] = {}

    def submit(self, asks: Sequence[Ask]) -> None:
        """All or nothing: when one is refused, those before it are cancelled."""
        try:
            for index, ask in enumerate(asks):
                request_id = f"{self.job_id}-{index}"
                self._unfinished[index] = request_id
                on_event = partial(self._from_engine, index)
                self._engine.submit(
                    ask.prompt_ids,
                    ask.params,
                    on_event,
                    request_id=request_id,
                    constraint=ask.constraint,
                    arrived_ns=self._arrived_ns,
                    second_at=ask.second_at,
                    **ask.terms._asdict(),
                )
        except BaseException:
            # The last one was refused, so the engine does not know it.
            self._unfinished.popitem()
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop what is still running or queued; harmless when all is finished."""
        for request_id in self._unfinished.values():
            self._engine.cancel(request_id)
        self._unfinished.clear()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until something has arrived; False when the time was up before."""
        if self._arrivals:
            return True
        # Leaner than wait_for around an Event: this is done once per token.
        self._waiter = self.loop.create_future()
        timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._wake, False)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            if timer:
                timer.cancel()

    def _wake(self, has_arrived: bool) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(has_arrived)

    @property
    def first_event(self) -> Event | None:
        """The oldest event that was not taken yet."""
        return self._arrivals[0].event if self._arrivals else None

    async def batches(self, patience: Patience) -> AsyncIterator[list[Arrival]]:
        """What has arrived since the last turn, until all are finished; empty means still waiting.

        Raises EngineStalled and SlowReader. Queued requests wait for as long as the engine moves
        for others.
        """
        turn_s = patience.ping_s or patience.stall_s
        still_s, stats = 0.0, self._engine.stats()
        while self._unfinished or self._arrivals or self._is_overrun:
            if self._is_overrun:
                raise SlowReader(f"more than {self._max_unread} events were left unread")
            if await self.wait(turn_s):
                still_s = 0.0
                yield self._take()
                continue
            before, stats = stats, self._engine.stats()
            still_s = still_s + turn_s if stats == before else 0.0
            if still_s >= patience.stall_s:
                raise EngineStalled(f"the engine has not moved for {still_s:g} s")
            if not self._engine.is_alive:
                raise EngineStalled("the engine thread has ended")
            if patience.ping_s:
                yield []

    def _take(self) -> list[Arrival]:
        batch, self._arrivals = self._arrivals, []
        return batch

    def _from_engine(self, index: int, event: Event) -> None:
        self._courier.send(self, Arrival(index, event))

    def arrive(self, arrival: Arrival) -> None:
        """For the courier, in the job's own loop."""
        index, event = arrival.index, arrival.event
        if isinstance(event, FinishEvent):
            self._unfinished.pop(index, None)
        # Also after a cancellation: how a request ended counts even when nobody reads it.
        self._observe(index, event)
        if len(self._arrivals) >= self._max_unread or self._is_overrun:
            self._overrun()
            return
        self._arrivals.append(arrival)
        self._wake(True)

    def _overrun(self) -> None:
        """What nobody reads is neither kept nor made."""
        self._is_overrun = True
        self._arrivals.clear()
        self.cancel()
