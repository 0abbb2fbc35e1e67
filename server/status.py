"""Routes that tell about the server: models, health, figures.

Owns: their shapes. Must not know: how answers are made, who may ask.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..runtime.machine import resident_bytes
from .lifecycle import RETRY_AFTER_S
from .service import Service

REASONS = {
    "dead": "the engine thread has ended; restart the server",
    "draining": "the server is stopping",
    "full": "the queue is full until an answer ends",
}


def add_status_routes(app: FastAPI, service: Service) -> None:
    _add_models(app, service)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        if service.engine.is_alive:
            return JSONResponse({"status": "ok"})
        return ailing("dead")

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        state = service.state
        return JSONResponse({"status": state}) if state == "ready" else ailing(state)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return figures(service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def ailing(state: str) -> Response:
    body = {"status": state, "reason": REASONS[state]}
    return JSONResponse(body, 503, {"Retry-After": RETRY_AFTER_S})


def figures(service: Service) -> dict[str, Any]:
    """What the page's panel shows. For programs there is /metrics."""
    now = service.engine.stats()
    return {
        "model": service.model_name,
        "context": service.context,
        "has_chat_template": service.template is not None,
        "state": service.state,
        "running": now.running,
        "waiting": now.waiting,
        "kv_blocks": {
            "total": now.blocks_total,
            "used": now.blocks_used,
            "cached": now.blocks_cached,
        },
        "prompt_tokens": {"computed": now.tokens_prefilled, "cached": now.tokens_cached},
        "steps": now.steps,
        "rows": now.rows,
        "last_step": service.last_step(),
        "recent": service.metrics.recent_latencies(),
        "resident_bytes": resident_bytes(),
    }


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())
    models: list[dict[str, Any]] = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "martlet",
            "max_model_len": service.context,
            "meta": {"n_vocab": service.tokenizer.vocab_size},
        }
        for name in service.names
    ]
    for number, name in enumerate(service.adapters):
        of_adapter = models[service.names.index(name)]
        of_adapter |= {"parent": service.model_name, "lora_id": number}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        for model in models:
            if model["id"] == model_id:
                return model
        raise service.unknown_model()
