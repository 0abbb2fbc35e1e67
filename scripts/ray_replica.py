"""One engine as a replica of Ray Serve, and the front that takes HTTP requests to it.

Owns: the two deployments' classes. Must not know: how replicas are chosen or started. Needs Ray.
Annotations are no strings here: of classes that Ray has wrapped, FastAPI cannot resolve them.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from martlet.scripts.prompt_chain import Digest, chain_of
from martlet.server.in_process import Relayed, relay
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError

TRIES = 3
"""Of a request of which nothing was answered yet, when its replica dies."""
NAME = b"x-martlet-replica"
"""A header of each answer: which replica it is from."""
NDJSON = "application/x-ndjson"
_LOST = "the replica that answered ended; ask again"


@dataclass(frozen=True)
class Asked:
    request: Relayed
    chain: list[int] = field(default_factory=list)


class Replica:
    """Holds the model and answers whole HTTP requests, as `martlet serve` would."""

    def __init__(
        self,
        spec: str,
        name: str,
        load: dict[str, Any],
        engine: dict[str, Any],
        api_keys: tuple[str, ...] = (),
    ) -> None:
        from martlet.scripts.generate import open_model
        from martlet.server.options import ANY, ServerOptions
        from martlet.server.run import hold

        context = serve.get_replica_context()
        self._name = context.replica_tag.encode()
        pin_cores(context.rank.local_rank, load["threads"])
        self._stack = ExitStack()
        model = self._stack.enter_context(open_model(spec, **load))
        options = ServerOptions(api_keys=api_keys, hosts=(ANY,))  # hosts have the cluster's names
        self._held = hold(model, model_name=name, options=options, **engine)
        self._stack.callback(self._held.close)
        runner = model.executor
        self._digest = Digest(runner.n_blocks * runner.block_tokens)

    async def answer(self, asked: Asked) -> AsyncIterator[Any]:
        """First (status, headers), then pieces of the body."""
        self._digest.learn(asked.chain)
        pieces = relay(self._held.app, asked.request)
        try:
            status, headers = await anext(pieces)
            yield status, [*headers, (NAME, self._name)]
            async for piece in pieces:
                yield piece
        finally:  # at once, where the front has left
            await pieces.aclose()

    def record_routing_stats(self) -> dict[str, Any]:
        return {"prefixes": self._digest.links()}

    def check_health(self) -> None:
        if not self._held.service.engine.is_alive:
            raise RuntimeError("the engine has ended")

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self._stack.close()


def pin_cores(local_rank: int, n_threads: int) -> None:
    """Cores of its own for each replica of a node, as far as there are any."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    first = local_rank * n_threads
    if first + n_threads <= len(cores):
        os.sched_setaffinity(0, cores[first : first + n_threads])


async def _until_lost(pieces: Any, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """The body; where its replica dies within a stream, an error in the stream's own form."""
    try:
        async for piece in pieces:
            yield piece
    except RayError:
        kind = headers.get(b"content-type", b"").decode()
        if kind.startswith("text/event-stream"):
            fault = {"error": {"message": _LOST, "type": "server_error", "code": None}}
            yield b"data: " + json.dumps(fault).encode() + b"\n\n"
        elif kind.startswith(NDJSON):
            yield json.dumps({"error": _LOST}).encode() + b"\n"
        else:
            raise
    finally:
        pieces.cancel()


def _object(body: bytes) -> dict[str, Any]:
    """Of a body of JSON; what is none is the replica's to refuse."""
    try:
        found = json.loads(body) if body else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


# Last: what it uses must be there when Ray wraps it.
api = FastAPI(title="martlet", docs_url=None, redoc_url=None, openapi_url=None)


@serve.ingress(api)
class Front:
    """Takes requests to replicas and answers back, as they come."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    @api.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "HEAD", "OPTIONS"])
    async def take(self, request: Request) -> Response:
        body = await self._body(request)
        if body is None:
            return refusal(413, f"the body has more than {self._max_body_bytes} bytes")
        asked = Asked(
            Relayed(
                request.method,
                request.url.path,
                request.url.query.encode(),
                list(request.headers.raw),
                body,
            ),
            chain_of(_object(body)),
        )
        for _ in range(TRIES):
            pieces = self._replicas.remote(asked)
            try:
                status, headers = await anext(pieces)
            except BackPressureError as error:
                return refusal(503, str(error), {"Retry-After": "1"})
            except RayActorError:
                continue  # nothing was answered yet: another replica may
            answer = StreamingResponse(_until_lost(pieces, dict(headers)), status)
            answer.raw_headers = [pair for pair in headers if pair[0] != b"transfer-encoding"]
            return answer
        return refusal(503, f"{TRIES} replicas ended before they answered", {"Retry-After": "1"})

    async def _body(self, request: Request) -> bytes | None:
        """None: it is too long."""
        taken = bytearray()
        async for piece in request.stream():
            taken += piece
            if len(taken) > self._max_body_bytes:
                return None
        return bytes(taken)
