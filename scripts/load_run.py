"""Puts a workload to a target, in a closed or an open loop, and keeps what became of each request.
Owns who asks when, and the client's own cost; must not know HTTP, engines or reports."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from martlet.quant.errors import MartletError
from martlet.runtime.aggregates import Outcome, Seen
from martlet.runtime.latency import NS_PER_MS
from martlet.scripts.load_stream import Heard
from martlet.scripts.load_targets import Answer, Question, Target
from martlet.scripts.load_workload import Conversation

KV_EVERY_S = 0.25
FAILURES = (OSError, MartletError, EOFError, ValueError)


@dataclass(frozen=True)
class Asked:
    """One request: who saw what, and what the server says of itself."""

    conversation: int
    turn: int
    sent_ns: int
    seen: Seen
    max_tokens: int
    error: str | None = None
    reason: str | None = None
    server: dict[str, Any] = field(default_factory=dict)
    """Its own `timings`, as it gave them."""

    @property
    def late_ms(self) -> float:
        """What the client took beyond the moment the request was due."""
        return (self.sent_ns - self.seen.arrived_ns) / NS_PER_MS


@dataclass(frozen=True)
class Run:
    """One measurement of one workload."""

    start_ns: int
    asked: Sequence[Asked]
    kv: Sequence[tuple[int, float]]
    """(monotonic_ns, share of the cache in use)"""
    client_cpu_s: float
    """Of this process, in which a direct target's engine also runs."""

    @property
    def seen(self) -> list[Seen]:
        return [each.seen for each in self.asked]


@dataclass
class _Raw:
    """A request whose answer nobody has read yet."""

    conversation: int
    turn: int
    max_tokens: int
    due_ns: int
    sent_ns: int
    end_ns: int
    answer: Answer | None
    outcome: Outcome
    error: str | None


async def run_load(
    target: Target,
    conversations: Sequence[Conversation],
    n_streams: int | None,
    *,
    timeout_s: float | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> Run:
    """n_streams: of a closed loop; None: every conversation when it is due."""
    raw: list[_Raw] = []
    start_ns, start_cpu_s = time.monotonic_ns(), time.process_time()

    async def converse(nth: int, due_ns: int | None) -> None:
        said: list[tuple[str, str]] = []
        turns = conversations[nth].turns
        for number, turn in enumerate(turns):
            question = Question(turn.text, turn.max_tokens, tuple(said))
            found = await _ask(target, question, nth, number, due_ns, timeout_s)
            raw.append(found)
            on_end()
            due_ns = None  # the next one is due when this one is answered
            if number + 1 < len(turns):
                heard = found.answer.read() if found.answer else Heard(error=found.error)
                if heard.error:
                    return
                said.append((turn.text, heard.text))

    async with _kv_samples(target) as kv:
        if n_streams is None:
            await _open_loop(converse, conversations, start_ns)
        else:
            await _closed_loop(converse, len(conversations), n_streams)
        cpu_s = time.process_time() - start_cpu_s
    asked = sorted((_read(each) for each in raw), key=lambda each: each.sent_ns)
    return Run(start_ns, asked, kv, cpu_s)


async def _closed_loop(converse: Callable[[int, int | None], Any], n: int, n_streams: int) -> None:
    left: Iterator[int] = iter(range(n))

    async def stream() -> None:
        for nth in left:
            await converse(nth, None)

    await asyncio.gather(*(stream() for _ in range(min(n_streams, n))))


async def _open_loop(
    converse: Callable[[int, int | None], Any], conversations: Sequence[Conversation], start_ns: int
) -> None:
    tasks = []
    for nth, each in enumerate(conversations):
        due_ns = start_ns + round((each.at_s or 0.0) * 1e9)
        wait_ns = due_ns - time.monotonic_ns()
        if wait_ns > 0:
            await asyncio.sleep(wait_ns / 1e9)
        tasks.append(asyncio.create_task(converse(nth, due_ns)))
    await asyncio.gather(*tasks)


async def _ask(
    target: Target,
    question: Question,
    nth: int,
    turn: int,
    due_ns: int | None,
    timeout_s: float | None,
) -> _Raw:
    sent_ns = time.monotonic_ns()
    answer, error = None, None
    outcome: Outcome = "ok"
    try:
        answer = await asyncio.wait_for(target.ask(question), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        outcome, error = "cancelled", f"no end after {timeout_s:g} s"
    except FAILURES as failure:
        outcome, error = "error", f"{type(failure).__name__}: {failure}"
    end_ns = time.monotonic_ns() if answer is None else answer.end_ns
    due_ns = sent_ns if due_ns is None else due_ns
    return _Raw(nth, turn, question.max_tokens, due_ns, sent_ns, end_ns, answer, outcome, error)


def _read(raw: _Raw) -> Asked:
    heard = raw.answer.read() if raw.answer else Heard(error=raw.error)
    outcome: Outcome = raw.outcome
    if outcome == "ok" and heard.error:
        outcome = "cancelled" if heard.reason == "cancelled" else "error"
    pieces, piece_tokens = heard.pieces
    seen = Seen(
        arrived_ns=raw.due_ns,
        end_ns=pieces[-1] if pieces and outcome == "ok" else raw.end_ns,
        outcome=outcome,
        n_output=heard.n_output,
        n_prompt=heard.n_prompt,
        n_cached=heard.n_cached,
        piece_ns=pieces,
        piece_tokens=piece_tokens,
    )
    return Asked(
        raw.conversation,
        raw.turn,
        raw.sent_ns,
        seen,
        raw.max_tokens,
        heard.error,
        heard.reason,
        heard.timings,
    )


@contextlib.asynccontextmanager
async def _kv_samples(target: Target) -> Any:
    """Grows meanwhile; a server that does not tell is not asked again."""
    found: list[tuple[int, float]] = []

    async def sample() -> None:
        with contextlib.suppress(*FAILURES):
            unknown = 0
            while unknown < 2:
                share = await target.kv_used()
                if share is None:
                    unknown += 1
                else:
                    found.append((time.monotonic_ns(), share))
                await asyncio.sleep(KV_EVERY_S)

    task = asyncio.create_task(sample())
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
