"""`martlet batch IN.jsonl OUT.jsonl`: answers a file of requests, as fast as the machine can.
Owns the options and how many requests are under way; the files are batch_file.py's, the answers the
server's own, asked without a socket."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.batch_file import Answers, Request, known_ids, read_requests
from martlet.scripts.console import chunk_progress, note

if TYPE_CHECKING:
    from martlet.server.shelf import Loaded

STEP_MS = 1e6
"""Nobody watches a stream: prompts get all the rows of a step."""
RUNNING, AHEAD = 32, 16
"""Requests that run at a time, and those that are ready when one ends."""
AGAIN_S = 0.2
UNAVAILABLE = 503


@options.with_load_options
def batch(
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", exists=True, dir_okay=False, help="Requests.")
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", dir_okay=False, help="Answers are added to it.")
    ],
    model: Annotated[str, typer.Option("-m", "--model", metavar="MODEL", help="As for `run`.")],
    load: options.LoadOptions,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model. Default: its file's name.")
    ] = None,
    context: options.ContextOption = None,
    kv_bytes: options.KvBytesOption = None,
    speculate: options.SpeculateOption = "auto",
) -> None:
    """Answer a file of requests in OpenAI's batch format. The same command goes on after a stop."""
    from martlet.scripts.generate import open_model
    from martlet.scripts.serve_many import served_name
    from martlet.server.options import ServerOptions
    from martlet.server.run import hold

    ids = known_ids(requests)
    with Answers(answers, ids) as written:
        left = len(ids) - len(written.answered)
        if written.answered:
            note(f"{len(written.answered)} of {len(ids)} are answered already")
        if not left:
            print(f"{len(ids)} requests, all answered: {answers}")
            return
        arguments = load.arguments(context=context, kv_bytes=kv_bytes, speculate=speculate)
        with open_model(model, **arguments) as opened:
            held = hold(
                opened,
                model_name=name or served_name(model),
                options=ServerOptions(),
                max_queue=AHEAD,
                step_ms=STEP_MS,
                speculate=speculate,
            )
            try:
                tally = Tally()
                with chunk_progress("requests", left) as report:
                    asyncio.run(answer_all(held, requests, written, tally, report))
            finally:
                held.close()
    print(f"{len(ids)} requests, {tally.n} answered now: {tally.summary()}; {answers}")


class Tally:
    """What has been done so far."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.n = self.n_failed = self.n_output = 0

    def count(self, status: int, body: Any) -> None:
        self.n += 1
        self.n_failed += status >= 400
        usage = body.get("usage") if isinstance(body, dict) else None
        usage = usage or {}
        self.n_output += usage.get("completion_tokens", usage.get("output_tokens", 0))

    def summary(self) -> str:
        seconds = time.monotonic() - self.start_s
        refused = f"{self.n_failed} refused (status_code tells why), " if self.n_failed else ""
        return f"{refused}{self.n_output / seconds:.1f} output tokens/s, {seconds:.0f} s"


async def answer_all(
    held: Loaded,
    path: Path,
    written: Answers,
    tally: Tally,
    report: Callable[[int, str], None],
) -> None:
    """Several at a time, in the order of the file; each is written when it is there."""
    asked = (each for each in read_requests(path) if each.custom_id not in written.answered)

    async def work(left: Iterator[Request]) -> None:
        for request in left:
            status, request_id, body = await answer(held, request)
            written.add(request.custom_id, status, request_id, body)
            tally.count(status, body)
            report(tally.n, tally.summary())

    workers = [asyncio.ensure_future(work(asked)) for _ in range(RUNNING + AHEAD)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()


async def answer(held: Loaded, request: Request) -> tuple[int, str, Any]:
    """(status, id of the request, body). Waits for as long as there is no room."""
    from martlet.server.in_process import ask

    body = json.dumps(request.body).encode()
    while True:
        found = await ask(held.app, request.url, body)
        if found.status != UNAVAILABLE:
            return found.status, found.headers.get("x-request-id", ""), json.loads(found.body)
        if not held.service.engine.is_alive:
            raise MartletError("the engine has ended; its error is above. The same command goes on")
        await asyncio.sleep(AGAIN_S)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["batch", *sys.argv[1:]])
