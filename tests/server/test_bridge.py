"""How events reach the event loop: all of a step in one trip, and nobody's are lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from martlet.runtime.events import Event, TokenEvent
from martlet.runtime.sampling import SamplingParams
from martlet.server.bridge import Ask, Courier, Job, Patience

PATIENCE = Patience(ping_s=0, stall_s=30)


class Engine:
    """Keeps what the jobs gave, for the test to call."""

    def __init__(self) -> None:
        self.owners: list[Callable[[Event], None]] = []

    def submit(
        self, prompt: object, params: object, on_event: Callable[[Event], None], **rest: Any
    ) -> None:
        self.owners.append(on_event)

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> None: ...


def token(index: int) -> TokenEvent:
    return TokenEvent(index, 65, "A", None, index)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def wakes_of(
    courier: Courier, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What the loop was woken for by the courier, from now on."""
    wakes, wake = [], loop.call_soon_threadsafe

    def noting(callback: Callable[..., Any], *args: Any) -> Any:
        if getattr(callback, "__self__", None) is courier:
            wakes.append(callback)
        return wake(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", noting)
    return wakes


async def next_batch(job: Job) -> list[int]:
    async for batch in job.batches(PATIENCE):
        return [arrival.index for arrival in batch]
    raise AssertionError("the job has ended")


def test_the_events_of_many_jobs_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine, courier = Engine(), Courier()
        jobs = [Job(engine, f"job{i}", courier=courier) for i in range(8)]
        for job in jobs:
            job.submit([Ask([1], SamplingParams())] * 2)
        wakes = wakes_of(courier, asyncio.get_running_loop(), monkeypatch)
        step = threading.Thread(target=lambda: [owner(token(0)) for owner in engine.owners])
        step.start()
        step.join()
        assert await asyncio.gather(*map(next_batch, jobs)) == [[0, 1]] * 8
        assert len(wakes) == 1
        engine.owners[0](token(1))
        assert await next_batch(jobs[0]) == [0], "the next step wakes it again"
        assert len(wakes) == 2

    run(main())


def test_no_event_is_lost_between_threads() -> None:
    n_tokens = 2000

    async def main() -> None:
        engine, courier = Engine(), Courier()
        jobs = [Job(engine, f"job{i}", courier=courier) for i in range(4)]
        for job in jobs:
            job.submit([Ask([1], SamplingParams())])

        def speak() -> None:
            for i in range(n_tokens):
                for owner in engine.owners:
                    owner(token(i))

        async def hear(job: Job) -> list[int]:
            heard: list[int] = []
            async for batch in job.batches(PATIENCE):
                heard += [arrival.event.index for arrival in batch]
                if len(heard) == n_tokens:
                    break
            return heard

        step = threading.Thread(target=speak)
        step.start()
        for heard in await asyncio.gather(*map(hear, jobs)):
            assert heard == list(range(n_tokens))
        step.join()

    run(main())


def test_a_closed_loop_takes_nobody_else_along() -> None:
    engine, courier = Engine(), Courier()

    async def leave() -> None:
        Job(engine, "gone", courier=courier).submit([Ask([1], SamplingParams())])

    async def stay() -> None:
        job = Job(engine, "here", courier=courier)
        job.submit([Ask([1], SamplingParams())])
        for owner in engine.owners:
            owner(token(0))
        assert await next_batch(job) == [0]

    run(leave())
    run(stay())


def test_waiting_ends_when_its_time_is_up() -> None:
    async def main() -> None:
        job = Job(Engine(), "job")
        job.submit([Ask([1], SamplingParams())])
        assert not await job.wait(0.01)

    run(main())
