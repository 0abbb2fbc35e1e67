"""The HTTP application: routes, and every error in the shape of its dialect.

Owns: create_app. Must not know: how answers are made (generate.py) or who may come in (guard.py).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from ..runtime.errors import MartletError, RequestError
from ..runtime.grammar import Grammars
from ..runtime.tokenizer import Tokenizer
from . import anthropic, embeddings, ollama, ollama_embed, openai_routes, openapi, rerank, tokens
from .access_log import AccessLog
from .asking import Fields
from .bridge import EngineLike
from .chat import ChatTemplate
from .connection import ClientGone
from .errors import SERVER_FAULT, ApiError, fault, from_typed
from .facts import ModelFacts
from .generate import CLIENT_GONE, Route, generate
from .guard import Guard
from .lifecycle import Gate, Lifecycle
from .metrics import Metrics
from .options import ServerOptions
from .page import add_page
from .service import Service
from .status import add_status_routes

log = logging.getLogger(__name__)

GENERATING: dict[str, Route] = {**openai_routes.ROUTES, **anthropic.ROUTES, **ollama.ROUTES}
EMBEDDING = {
    **dict.fromkeys(rerank.PATHS, rerank.rerank),
    embeddings.PATH: embeddings.embed,
    "/api/embed": ollama_embed.embed,
    "/api/embeddings": ollama_embed.embeddings,
}
_POSTS = [*GENERATING, *EMBEDDING, *tokens.ROUTES, anthropic.COUNT_TOKENS, ollama.SHOW]
NEEDS_MODEL = {**dict.fromkeys(_POSTS, "POST"), tokens.INFO: "GET", openapi.PATH: "GET"}
"""Paths and methods of what no server can answer without the model itself."""
KINDS: dict[str, type[Fields]] = {
    **{path: route.kind for path, route in GENERATING.items()},
    **{path: kind for path, (kind, _) in tokens.ROUTES.items()},
    embeddings.PATH: embeddings.EmbeddingsRequest,
    **dict.fromkeys(rerank.PATHS, rerank.RerankRequest),
    "/api/embed": ollama_embed.OllamaEmbed,
    "/api/embeddings": ollama_embed.OllamaEmbeddings,
    **anthropic.KINDS,
    **ollama.KINDS,
}
"""What bodies are, by path."""


def create_app(
    engine: EngineLike,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    context: int | None = None,
    max_unfinished: int | None = None,
    chat_template: str | None = None,
    fingerprint: str = "martlet",
    options: ServerOptions | None = None,
    facts: ModelFacts | None = None,
    lifecycle: Lifecycle | None = None,
    adapters: Sequence[str] = (),
    last_step: Callable[[], dict[str, Any] | None] = lambda: None,
) -> FastAPI:
    """An app over a started engine; who starts it closes it.

    chat_template: instead of the model's own. Raises ChatTemplateError when it does not compile.
    max_unfinished: how many requests the engine takes at a time; None is not known.
    fingerprint: should change whenever the same request and seed could give other tokens.
    lifecycle: of the app that this becomes a part of, which then also keeps the doors.
    last_step: what it asked of the machine, as of load.py.
    adapters: names of the engine's, by their numbers. Raises RequestError for one of the model's.
    """
    options = options or ServerOptions()
    for name in {model_name, *options.model_aliases} & {*adapters}:
        raise RequestError(
            f"an adapter and the model are both called {name!r}; give one another name: "
            "--lora NAME=PATH, or --name of the model",
            field="lora",
        )
    source = chat_template if chat_template is not None else tokenizer.chat_template
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        template=None if source is None else ChatTemplate(source, tokenizer),
        model_name=model_name,
        fingerprint=fingerprint,
        options=options,
        metrics=Metrics(engine.stats, model_name, vllm_names=options.vllm_names),
        grammars=Grammars(tokenizer),
        context=context,
        max_unfinished=max_unfinished,
        stays=lifecycle is None,
        facts=facts or ModelFacts(),
        adapters=tuple(adapters),
        lifecycle=lifecycle or Lifecycle(),
        last_step=last_step,
    )
    # The interactive pages would load scripts from elsewhere; the schema says less than the docs.
    app = FastAPI(title="martlet", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # FastAPI keeps what routes are made of for as long as the process lives: no model among it.
    seen: Service = weakref.proxy(service)
    add_errors(app)
    add_status_routes(app, seen)
    add_page(app)
    _add_answering_routes(app, seen)
    anthropic.add_routes(app, seen)
    ollama.add_routes(app, seen)
    ollama.add_fixed_routes(app)
    tokens.add_routes(app, seen)
    openapi.add_description(app, KINDS)
    if lifecycle is None:
        add_doors(app, options, service.lifecycle)
    return app


def add_doors(app: FastAPI, options: ServerOptions, lifecycle: Lifecycle) -> None:
    """Each stands before those added earlier."""
    app.state.lifecycle = lifecycle
    app.add_middleware(Gate, lifecycle=lifecycle, max_per_client=options.max_per_client)
    app.add_middleware(Guard, options=options)
    # CORS headers also go on what the guard refuses.
    if options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id",),
        )
    if options.log:
        app.add_middleware(AccessLog, log=options.log, has_prompts=options.log_prompts)


Answerer = Callable[[Request], Awaitable[Response]]


def _add_answering_routes(app: FastAPI, service: Service) -> None:
    answerers: dict[str, Answerer] = {
        **{path: partial(generate, service, route) for path, route in GENERATING.items()},
        **{path: partial(embed, service) for path, embed in EMBEDDING.items()},
    }
    for path, answerer in answerers.items():
        app.post(path, response_model=None)(_endpoint(service, path, answerer))


def _endpoint(service: Service, path: str, answerer: Answerer) -> Answerer:
    async def answer(request: Request) -> Response:
        service.check_alive()
        service.check_room()
        return await answerer(request)

    async def endpoint(request: Request) -> Response:
        response = await _answer(answer, request)
        service.metrics.count_answer(path, response.status_code)
        return response

    return endpoint


async def _answer(answerer: Answerer, request: Request) -> Response:
    try:
        return await answerer(request)
    except (ClientGone, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    except MartletError as error:
        problem = from_typed(error)
    except ApiError as error:
        problem = error
    except Exception:
        log.exception("request %s failed", request.state.request_id)
        problem = fault("internal error; the server's log has the details")
    return problem.response(request.scope["path"])


def add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope["path"])

    @app.exception_handler(MartletError)
    async def typed_error(request: Request, error: MartletError) -> JSONResponse:
        return from_typed(error).response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.scope["path"]
        message = f"{request.method} {path[:200]}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers or {}).response(path)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "internal error", SERVER_FAULT).response(request.scope["path"])
