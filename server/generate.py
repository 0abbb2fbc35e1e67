"""One generating request from bytes to an answer: read, prepare, submit, wait, reply.

Owns: Route (what a dialect brings) and that order of events. Must not know: paths, keys, hosts,
dialects beyond their Route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from ..runtime.errors import QueueFull
from ..runtime.grammar import Grammar
from .answer import Choice
from .asking import MAX_SEED, Addressed, Asked, read
from .bridge import Ask, Job, Terms
from .connection import ClientGone, EventStream, unless_gone
from .errors import refused
from .ids import new_id
from .keep_alive import STAYS
from .reasoning import Splitter
from .reply import NewWriter, Reply, Writer
from .schema import MAX_CHOICES
from .service import Prompt, Service
from .spans import Told, both
from .stream import collect, stream, unfinished
from .structured import compiled
from .tool_reader import CallReader
from .tools import answer_grammar, shown_ids

ToModel = TypeVar("ToModel", bound=Addressed)

CLIENT_GONE = 499  # nginx's number for it; nobody receives it
MAX_IGNORED_NAMES = 20


@dataclass(frozen=True)
class Route:
    """How one dialect is read and written."""

    kind: type[Asked]
    prompts: Callable[[Service, Any], list[Prompt]]
    """None of them asks for an empty answer, which needs no engine."""
    writer: NewWriter
    id_prefix: str


@dataclass(frozen=True)
class Prepared:
    """A request that was read and found good; only the engine may still refuse it."""

    request: Asked
    prompts: list[Prompt]
    asks: list[Ask]
    ignored: list[str]


def prepare(service: Service, route: Route, body: bytes, tenant: bytes = b"") -> Prepared:
    """All that needs no engine. Runs beside the event loop: a long prompt takes its time here."""
    request, ignored = read_request(service, route.kind, body)
    service.check_able("generate")
    params = request.sampling(service.tokenizer.vocab_size)
    prompts = route.prompts(service, request)
    if any(not prompt.ids for prompt in prompts):
        raise refused("the prompt has no tokens", param="prompt")
    n_asks = request.n_asks
    if len(prompts) * n_asks > MAX_CHOICES:
        name = "n" if n_asks == getattr(request, "n", None) else "best_of"
        raise refused(
            f"{len(prompts)} prompts with {name} {n_asks} each, at most {MAX_CHOICES}", name
        )
    terms = service.adapted(request.terms(tenant), request.model)
    asks, terms = [], within(terms, service.options.max_request_s)
    if request.tool_use:
        terms = terms._replace(show_ids=shown_ids(service.tokenizer, service.tool_format))
    for prompt in prompts:
        grammar = grammar_of(service, request, prompt)
        for nth in range(n_asks):
            # Choices of one prompt must differ, so each has its own seed: seed, seed + 1, …
            seed = None if params.seed is None else (params.seed + nth) & MAX_SEED
            constraint = grammar.start() if grammar else None
            asks.append(Ask(prompt.ids, replace(params, seed=seed), terms, constraint))
    return Prepared(request, prompts, asks, ignored)


def grammar_of(service: Service, request: Asked, prompt: Prompt) -> Grammar | None:
    form, use, may_think = request.form, request.tool_use, prompt.thinks
    if use:
        tokenizer, written = service.tokenizer, service.tool_format
        return answer_grammar(service.grammars, tokenizer, use, written, form, may_think=may_think)
    return form and compiled(service.grammars, form, may_think=may_think)


def within(terms: Terms, max_request_s: float | None) -> Terms:
    """With a deadline not beyond the server's own."""
    if max_request_s is None:
        return terms
    most_ms = round(max_request_s * 1000)
    return terms._replace(deadline_ms=min(terms.deadline_ms or most_ms, most_ms))


def read_request(service: Service, kind: type[ToModel], body: bytes) -> tuple[ToModel, list[str]]:
    """A request this model is to answer, and the fields of it that nobody knows."""
    request, ignored = read(body, kind)
    if ignored and service.options.strict_fields:
        raise refused(f"{ignored[0]}: unknown field", param=ignored[0])
    service.check_name(request.model)
    if service.stays and getattr(request, "keep_alive", None) not in (None, STAYS):
        ignored.append("keep_alive")
    return request, ignored


async def generate(service: Service, route: Route, request: Request) -> Response:
    """The answer to a generating request. Raises ApiError and typed errors."""
    try:
        body = await request.body()
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    tenant = getattr(request.state, "tenant", b"")
    prepared = await asyncio.to_thread(prepare, service, route, body, tenant)
    is_stream = prepared.request.is_stream
    reply = make_reply(service, prepared, route.id_prefix + new_id())
    request.state.choices = reply.choices  # for the access log
    writer = route.writer(reply)
    watch = service.metrics.watch(is_stream)
    if service.options.spans and prepared.asks:
        watch = both(watch, service.options.spans(told(service, request, prepared, reply)))
    unread = service.options.max_unread
    job = Job(service.engine, reply.id, watch, service.courier, unread, request.state.arrived_ns)
    headers = ignored_header(prepared.ignored)
    patience = service.options.patience
    try:
        submit(job, prepared.asks)
        if is_stream:
            return await unless_gone(
                request.receive, open_stream(service, job, writer, reply, headers)
            )
        answer = await unless_gone(request.receive, collect(job, writer, reply.choices, patience))
    except ClientGone:
        job.cancel()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        job.cancel()
        raise
    return JSONResponse(answer, headers=headers)


def told(service: Service, request: Request, prepared: Prepared, reply: Reply) -> Told:
    """As the first of its engine requests has it; the others differ in their seeds."""
    return Told(
        path=request.scope["path"],
        headers=request.headers,
        answer_id=reply.id,
        asked_model=reply.model,
        served_model=service.model_name,
        params=prepared.asks[0].params,
        n_asks=len(prepared.asks),
        arrived_ns=request.state.arrived_ns,
    )


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
    # A space at its end would make the header, and with it the whole answer, an invalid one.
    shown = ", ".join(_plain(name) for name in names[:MAX_IGNORED_NAMES])
    return {"x-martlet-ignored": shown} if names else {}


def _plain(name: str) -> str:
    return ascii(name)[1:-1].replace(" ", r"\x20") or "''"


def make_reply(service: Service, prepared: Prepared, reply_id: str) -> Reply:
    request, n = prepared.request, prepared.request.n_asks
    choices, use = [], request.tool_use
    for index, ask in enumerate(prepared.asks):
        thinks = prepared.prompts[index // n].thinks
        splitter = None if thinks is None else Splitter(thinks)
        choices.append(
            Choice(
                index,
                index // n,
                len(ask.prompt_ids),
                splitter,
                reader=reader_of(service, request),
                # OpenAI's rule: who named the function knows that it is called.
                end_of_calls="stop" if use and use.mode == "named" else "tool_calls",
            )
        )
    return Reply(
        id=reply_id,
        created=time.time(),
        model=request.model or service.model_name,
        fingerprint=service.fingerprint,
        tokenizer=service.tokenizer,
        request=request,
        choices=choices,
        echoes=[prepared.prompts[choice.prompt_index].echo for choice in choices],
        prompt_ids=[ask.prompt_ids for ask in prepared.asks],
    )


def reader_of(service: Service, request: Asked) -> CallReader | None:
    use = request.tool_use
    return CallReader(service.tool_format, use.callable, use.schemas()) if use else None


async def open_stream(
    service: Service, job: Job, writer: Writer, reply: Reply, headers: dict[str, str]
) -> Response:
    """Commits to status 200 only when there is a first event, or after a short grace."""
    if reply.choices:
        await job.wait(service.options.grace_s)
    first = Choice(0, 0, 0)
    if job.first_event is not None:
        first.add(job.first_event)
    if first.failure:
        raise unfinished(first)
    events = stream(job, writer, reply.choices, service.options.patience)
    return EventStream(events, job, writer.media_type, headers)
