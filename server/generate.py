"""One generating request from bytes to an answer: read, prepare, submit, wait, reply.

Owns: Service (what the routes need of a model) and that order of events. Must not know: paths,
keys, hosts; dialects beyond which Shape and reader a route brings.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..runtime.errors import QueueFull
from ..runtime.tokenizer import Tokenizer
from .answer import Choice
from .bridge import Ask, Courier, EngineLike, Job
from .chat import ChatTemplate
from .errors import ApiError, refused
from .metrics import Metrics
from .options import ServerOptions
from .schema import (
    MAX_CHOICES,
    MAX_SEED,
    ChatRequest,
    CompletionRequest,
    Generation,
    check_token_id,
    read,
)
from .shapes import CHAT, COMPLETION, Shape
from .stream import Reply, collect, stream, unfinished

CLIENT_GONE = 499  # nginx's number for it; nobody receives it
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MAX_IGNORED_NAMES = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """A model behind HTTP."""

    engine: EngineLike
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str
    fingerprint: str
    options: ServerOptions
    metrics: Metrics
    courier: Courier = field(default_factory=Courier)


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and its text where it is to be echoed."""

    ids: list[int]
    echo: str = ""


@dataclass(frozen=True)
class Prepared:
    """A request that was read and found good; only the engine may still refuse it."""

    request: Generation
    prompts: list[Prompt]
    asks: list[Ask]
    ignored: list[str]


@dataclass(frozen=True)
class Route:
    """How one dialect is read and written."""

    shape: Shape
    kind: type[Generation]
    prompts: Callable[[Service, Any], list[Prompt]]


def chat_prompts(service: Service, request: ChatRequest) -> list[Prompt]:
    if service.template is None:
        raise refused("this model has no chat template; use /v1/completions", code="no_template")
    messages = [message.model_dump() for message in request.messages]
    generates = request.add_generation_prompt
    return [Prompt(service.template.encode(messages, add_generation_prompt=generates))]


def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    tokenizer = service.tokenizer
    prompts = []
    for given in request.prompt:
        if isinstance(given, str):
            ids = tokenizer.encode(given, add_special=True, parse_special=True)
            prompts.append(Prompt(ids, given if request.echo else ""))
            continue
        for token_id in given:
            check_token_id(token_id, tokenizer.vocab_size, "prompt")
        prompts.append(Prompt(given, tokenizer.decode(given) if request.echo else ""))
    return prompts


CHAT_ROUTE = Route(CHAT, ChatRequest, chat_prompts)
COMPLETION_ROUTE = Route(COMPLETION, CompletionRequest, completion_prompts)


def prepare(service: Service, route: Route, body: bytes, tenant: bytes = b"") -> Prepared:
    """All that needs no engine. Runs beside the event loop: a long prompt takes its time here."""
    request, ignored = read(body, route.kind)
    if ignored and service.options.strict_fields:
        raise refused(f"{ignored[0]}: unknown field", param=ignored[0])
    known = {service.model_name, *service.options.model_aliases}
    if request.model is not None and request.model not in known:
        raise unknown_model(service)
    params = request.sampling(service.tokenizer.vocab_size)
    prompts = route.prompts(service, request)
    if any(not prompt.ids for prompt in prompts):
        raise refused("the prompt has no tokens", param="prompt")
    if len(prompts) * request.n_asks > MAX_CHOICES:
        name = "n" if request.n_asks == request.n else "best_of"
        raise refused(
            f"{len(prompts)} prompts with {name} {request.n_asks} each, at most {MAX_CHOICES}", name
        )
    asks, terms = [], request.terms(tenant)
    for prompt in prompts:
        for nth in range(request.n_asks):
            # Choices of one prompt must differ, so each has its own seed: seed, seed + 1, …
            seed = None if params.seed is None else (params.seed + nth) & MAX_SEED
            asks.append(Ask(prompt.ids, replace(params, seed=seed), terms))
    return Prepared(request, prompts, asks, ignored)


def unknown_model(service: Service) -> ApiError:
    message = f"the model is not served here; this server has {service.model_name!r}"
    return ApiError(404, message, param="model", code="model_not_found")


async def generate(service: Service, route: Route, request: Request) -> Response:
    """The answer to a generating request. Raises ApiError and typed errors."""
    try:
        body = await request.body()
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    tenant = getattr(request.state, "tenant", b"")
    prepared = await asyncio.to_thread(prepare, service, route, body, tenant)
    is_stream = prepared.request.stream
    reply_id = route.shape.id_prefix + uuid.uuid4().hex
    reply = make_reply(service, route, prepared, reply_id)
    job = Job(service.engine, reply_id, service.metrics.watch(is_stream), service.courier)
    headers = ignored_header(prepared.ignored)
    try:
        submit(job, prepared.asks)
        if is_stream:
            return await unless_gone(request, open_stream(service, job, reply, headers))
        answer = await unless_gone(request, collect(job, reply, service.options.patience))
    except ClientGone:
        job.cancel()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        job.cancel()
        raise
    return JSONResponse(answer, headers=headers)


def submit(job: Job, asks: Sequence[Ask]) -> None:
    """Raises QueueFull for what may be accepted later, ApiError 400 for what never can be."""
    try:
        job.submit(asks)
    except QueueFull as full:
        if len(asks) <= full.limit:
            raise
        message = f"{len(asks)} answers at once; this server takes at most {full.limit}"
        raise refused(message, param="n") from None


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Unknown fields by name; what a header cannot carry is spelled out."""
    shown = ", ".join(ascii(name)[1:-1] for name in names[:MAX_IGNORED_NAMES])
    return {"x-martlet-ignored": shown} if names else {}


def make_reply(service: Service, route: Route, prepared: Prepared, reply_id: str) -> Reply:
    request, n = prepared.request, prepared.request.n_asks
    choices = [
        Choice(index, index // n, len(ask.prompt_ids)) for index, ask in enumerate(prepared.asks)
    ]
    return Reply(
        shape=route.shape,
        tokenizer=service.tokenizer,
        head={
            "id": reply_id,
            "created": int(time.time()),
            "model": request.model or service.model_name,
            "system_fingerprint": service.fingerprint,
        },
        choices=choices,
        echoes=[prepared.prompts[choice.prompt_index].echo for choice in choices],
        n_best=request.n,
        has_logprobs=request.n_logprobs is not None,
        include_usage=bool(request.stream_options.include_usage),
        continuous_usage=bool(request.stream_options.continuous_usage_stats),
    )


async def open_stream(
    service: Service, job: Job, reply: Reply, headers: dict[str, str]
) -> Response:
    """Commits to status 200 only when there is a first event, or after a short grace."""
    await job.wait(service.options.grace_s)
    first = Choice(0, 0, 0)
    if job.first_event is not None:
        first.add(job.first_event)
    if first.failure:
        raise unfinished(first)
    events = stream(job, reply, service.options.patience)
    return EventStream(events, job, headers)


class EventStream(StreamingResponse):
    """A stream that ends its job, however it ends itself."""

    def __init__(self, events: AsyncIterator[str], job: Job, headers: dict[str, str]) -> None:
        super().__init__(events, headers={**SSE_HEADERS, **headers}, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class ClientGone(Exception):
    """The connection closed before there was anything to send."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is given up when the client leaves. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
