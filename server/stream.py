"""A running job as a stream, or collected into one body; in any dialect.

Owns: the order start, events, end; signs of life; what happens when a choice fails or the engine
stands still. Must not know: dialects beyond their Writer, sockets, how a request was read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from .answer import Choice
from .bridge import EngineStalled, Job, Patience, SlowReader
from .errors import ApiError, fault, late
from .reply import Json, Writer


def unfinished(choice: Choice) -> ApiError:
    """For a choice that has a failure."""
    is_late = choice.finish is not None and choice.finish.reason == "deadline"
    return (late if is_late else fault)(choice.failure or "")


async def collect(job: Job, writer: Writer, choices: Sequence[Choice], patience: Patience) -> Json:
    """The body of a non-streamed answer. Raises ApiError."""
    await finished(job, choices, patience)
    return writer.body()


async def finished(job: Job, choices: Sequence[Choice], patience: Patience) -> None:
    """Until all choices are whole. Raises ApiError."""
    try:
        async for batch in job.batches(Patience(ping_s=0, stall_s=patience.stall_s)):
            for arrival in batch:
                choice = choices[arrival.index]
                choice.add(arrival.event)
                if choice.failure:
                    raise unfinished(choice)
    except (EngineStalled, SlowReader) as error:
        raise stalled(error) from None


async def stream(
    job: Job, writer: Writer, choices: Sequence[Choice], patience: Patience
) -> AsyncIterator[str]:
    """A streamed answer, several events per string where they came together."""
    if opening := writer.start():
        yield opening
    write = writer.event
    try:
        async for batch in job.batches(patience):
            if not batch:
                yield writer.ping
                continue
            yield "".join([write(arrival.index, arrival.event) for arrival in batch])
            failed = next((c for c in choices if c.finish and c.failure), None)
            if failed:
                yield writer.error(unfinished(failed))
                return
    except (EngineStalled, SlowReader) as error:
        yield writer.error(stalled(error))
        return
    yield writer.end()


def stalled(error: EngineStalled | SlowReader) -> ApiError:
    return fault(str(error), code=error.code)
