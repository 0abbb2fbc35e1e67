"""The OpenAPI document at /openapi.json, for programs that make clients or checks out of one.

Owns: which statuses and shapes each route answers with, as far as a schema can say it; docs/api.md
says the rest. Must not know: how answers are made. Requests are the dialects' own models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema

from .asking import Fields
from .errors import ApiError

Json = dict[str, Any]

PATH = "/openapi.json"
REF = "#/components/schemas/{model}"
JSON_TYPE, NDJSON, EVENTS = "application/json", "application/x-ndjson", "text/event-stream"
TYPES = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
CHUNKED: Mapping[str, str] = {
    "/v1/chat/completions": EVENTS,
    "/v1/completions": EVENTS,
    "/v1/responses": EVENTS,
    "/v1/messages": EVENTS,
    "/api/chat": NDJSON,
    "/api/generate": NDJSON,
}
"""What a stream is made of, where there is one."""

REASONS: Mapping[str, str] = {
    "400": "The request cannot be honoured; the message names the field.",
    "401": "A key is needed.",
    "403": "This host or origin is not served.",
    "404": "No such model.",
    "405": "The route has another method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many unfinished requests of one client.",
    "500": "A fault of the server.",
    "503": "Full, stopping, or without an engine; Retry-After says when to ask again.",
    "504": "The request's deadline has passed.",
}
OF_METHOD: Mapping[str, tuple[str, ...]] = {
    "GET": ("401", "403", "404", "405", "500", "503"),
    "POST": tuple(REASONS),
}
OPEN = ("/health", "/ready")
"""Their 503 is a state, not an error."""

RANKED: Mapping[str, type] = {
    "id": str, "object": str, "model": str, "results": list, "usage": dict,
}  # fmt: skip
ANSWERS: Mapping[str, Mapping[str, type]] = {
    "/v1/chat/completions": {
        "id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict,
    },
    "/v1/completions": {
        "id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict,
    },
    "/v1/responses": {"id": str, "object": str, "status": str, "output": list, "model": str},
    "/v1/messages": {
        "id": str, "type": str, "role": str, "content": list, "model": str, "usage": dict,
    },
    "/v1/messages/count_tokens": {"input_tokens": int},
    "/api/chat": {"model": str, "created_at": str, "done": bool},
    "/api/generate": {"model": str, "created_at": str, "done": bool},
    "/v1/embeddings": {"object": str, "data": list, "model": str, "usage": dict},
    "/v1/rerank": RANKED,
    "/rerank": RANKED,
    "/api/embed": {"model": str, "embeddings": list},
    "/api/embeddings": {"embedding": list},
    "/api/show": {"details": dict, "model_info": dict, "capabilities": list},
    "/api/tags": {"models": list},
    "/api/ps": {"models": list},
    "/api/version": {"version": str},
    "/v1/models": {"object": str, "data": list},
    "/v1/models/{model_id}": {"id": str, "object": str, "created": int, "owned_by": str},
    "/tokenize": {"tokens": list, "count": int},
    "/detokenize": {"prompt": str, "content": str},
    "/tokenizer_info": {"vocab_size": int, "end_of_generation_tokens": list},
    "/health": {"status": str},
    "/ready": {"status": str},
    "/stats": {"model": str, "state": str, "resident_bytes": int},
}  # fmt: skip
"""Of status 200: what is always there, and there may be more."""


def add_description(app: FastAPI, kinds: Mapping[str, type[Fields]]) -> None:
    """Of the routes that `app` has by now. kinds: what their bodies are."""
    app.state.document = described(app, kinds)
    app.get(PATH, include_in_schema=False)(description)


async def description(request: Request) -> Json:
    """No closure: FastAPI keeps what answers for as long as the process lives, and a server of
    several models makes an app for each that it loads."""
    document: Json = request.app.state.document
    return document


def described(app: FastAPI, kinds: Mapping[str, type[Fields]]) -> Json:
    models = [(kind, "validation") for kind in dict.fromkeys(kinds.values())]
    refs, schemas = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    paths: dict[str, Json] = {}
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        kind = kinds.get(route.path)
        body: Any = refs[kind, "validation"] if kind else {"type": "object"}
        for method in sorted((route.methods or set()) & OF_METHOD.keys()):
            of_path = paths.setdefault(route.path_format, {})
            of_path[method.lower()] = _operation(route.path_format, method, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "martlet", "version": "1", "description": "docs/api.md says more."},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, method: str, body: Json) -> Json:
    operation: Json = {
        "responses": {
            "200": {"description": "The answer.", "content": _content(path)},
            **{status: _failure(path, status) for status in OF_METHOD[method]},
        }
    }
    if "{model_id}" in path:
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": body}}}
    if path not in OPEN:
        operation["security"] = [{}, {"key": []}]
    return operation


def _content(path: str) -> Json:
    if path == "/metrics":
        return {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    whole: Json = {JSON_TYPE: {"schema": _object(ANSWERS.get(path, {}))}}
    return whole | ({CHUNKED[path]: {"schema": {"type": "string"}}} if path in CHUNKED else {})


def _object(fields: Mapping[str, type]) -> Json:
    types = {**TYPES, bool: "boolean"}
    properties = {name: {"type": types[kind]} for name, kind in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields)}


def _failure(path: str, status: str) -> Json:
    shape = like(ApiError(int(status), "", param="").body(path))
    if path in OPEN and status == "503":
        shape = _object({"status": str, "reason": str})
    return {"description": REASONS[status], "content": {JSON_TYPE: {"schema": shape}}}


def like(example: Json) -> Json:
    """The schema of objects with just these fields; None stands for a string or null."""
    properties: Json = {}
    for name, value in example.items():
        if isinstance(value, dict):
            properties[name] = like(value)
        else:
            is_optional = name in ("param", "code")
            properties[name] = {"type": ["string", "null"] if is_optional else "string"}
    fields = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": fields,
        "additionalProperties": False,
    }
