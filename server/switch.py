"""One application over several models: each request goes to the model it names.

Owns: create_shelf_app, finding the name, the routes that tell of all models. Must not know: how
models are loaded or kept (shelf.py), any dialect beyond where its lists of models are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..runtime.errors import MartletError
from . import ollama
from .app import NEEDS_MODEL, add_doors, add_errors
from .errors import ApiError, from_typed
from .keep_alive import seconds_of
from .options import ServerOptions
from .page import add_page
from .shelf import Place, Shelf
from .status import ailing, figures


def create_shelf_app(shelf: Shelf, options: ServerOptions) -> FastAPI:
    app = FastAPI(title="martlet", docs_url=None, redoc_url=None, openapi_url=None)
    add_errors(app)
    add_page(app)
    _add_models(app, shelf)
    _add_health(app, shelf)
    ollama.add_fixed_routes(app)
    switch = Switch(shelf)
    app.router.routes += [Route(path, switch, methods=[m]) for path, m in NEEDS_MODEL.items()]
    add_doors(app, options, shelf.lifecycle)
    return app


class Switch:
    """ASGI: hands a request to the application of the model that its body names."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        try:
            wish = wish_of(scope["path"], body)
            place = self._shelf.find(wish.name)
            if wish.is_farewell:
                await self._shelf.let_go(place)
                answer = JSONResponse(ollama.unloaded(scope["path"], wish.name or place.name))
                await answer(scope, receive, send)
                return
            async with self._shelf.use(place, wish.keep_alive_s) as loaded:
                await loaded.app(scope, replaying(body, receive), send)
        except MartletError as error:
            await from_typed(error).response(scope["path"])(scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)


class Wish(NamedTuple):
    """What a request says of the model itself."""

    name: str | None = None
    keep_alive_s: float | None = None
    """How long it is to stay afterwards; None: nothing is said."""
    is_farewell: bool = False
    """Nothing else is asked for than that it goes now."""


def wish_of(path: str, body: bytes) -> Wish:
    """What is no request is for the model to refuse."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError:
        return Wish()
    if not isinstance(given, dict):
        return Wish()
    name = given.get("model") or given.get("name")
    keep_alive_s = _keep_alive(given) if path in ollama.KEEPING else None
    asks_nothing = path in ollama.ASKING and not given.get(ollama.ASKING[path])
    is_farewell = keep_alive_s == 0 and asks_nothing
    return Wish(name if isinstance(name, str) else None, keep_alive_s, is_farewell)


def _keep_alive(given: dict[str, Any]) -> float | None:
    try:
        return None if given.get("keep_alive") is None else seconds_of(given["keep_alive"])
    except ValueError:
        return None


def replaying(body: bytes, receive: Receive) -> Receive:
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed


def _add_models(app: FastAPI, shelf: Shelf) -> None:
    created = int(time.time())

    def described(place: Place) -> dict[str, Any]:
        service = place.loaded.service if place.loaded else None
        return {
            "id": place.name,
            "object": "model",
            "created": created,
            "owned_by": "martlet",
            "max_model_len": service.context if service else None,
            "status": {"value": "loaded" if service else "unloaded"},
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(each) for each in shelf.places.values()]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        return described(shelf.find(model_id))

    @app.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags() -> dict[str, Any]:
        places = shelf.places.values()
        return {"models": [ollama.listed(place.facts, place.name) for place in places]}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        places = shelf.places.values()
        running = [(place.loaded.service, place.stays_s) for place in places if place.loaded]
        return {"models": [ollama.running(*each) for each in running]}


def _add_health(app: FastAPI, shelf: Shelf) -> None:
    def state() -> str:
        services = _services(shelf)
        if any(not service.engine.is_alive for service in services):
            return "dead"
        if shelf.lifecycle.is_draining:
            return "draining"
        is_full = len(services) == len(shelf.places) and all(s.is_full for s in services)
        return "full" if is_full else "ready"

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return ailing("dead") if state() == "dead" else JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        now = state()
        return JSONResponse({"status": now}) if now == "ready" else ailing(now)

    @app.get("/stats")
    async def stats(model: str | None = None) -> dict[str, Any]:
        place = shelf.find(model)
        if place.loaded:
            return figures(place.loaded.service)
        now = state()
        return {"model": place.name, "state": "unloaded" if now == "ready" else now}

    @app.get("/metrics")
    async def metrics() -> Response:
        registry = CollectorRegistry()
        registry.register(Together([service.metrics.registry for service in _services(shelf)]))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _services(shelf: Shelf) -> list[Any]:
    return [place.loaded.service for place in shelf.places.values() if place.loaded]


class Together(Collector):
    """The samples of several registries, each metric with its HELP and TYPE once."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return ()
