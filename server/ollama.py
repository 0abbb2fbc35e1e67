"""Ollama's dialect: its requests as prompts, and the routes that only describe the model.

Owns: paths under /api. Must not know: the engine, how answers are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from .errors import ApiError
from .facts import ModelFacts
from .generate import Route, read_request
from .infill import infill_ids
from .keep_alive import STAYS
from .ollama_schema import OllamaChat, OllamaGenerate, OllamaShow
from .ollama_writer import OllamaWriter, chat_piece, generate_piece, rfc3339
from .service import Prompt, Service, chat_prompt

API_VERSION = "0.12.11"
"""The Ollama release whose API this is: clients compare it to know what they may send."""
NEVER_S = 4e9  # seconds since 1970, in 2096: the model stays

GENERATE = "/api/generate with raw: true"


def chat_prompts(service: Service, request: OllamaChat) -> list[Prompt]:
    request.check_context(service.context)
    if not request.messages:
        return []
    messages = [message.for_template() for message in request.messages]
    use, effort = request.tool_use, request.effort
    return [chat_prompt(service, messages, effort=effort, instead=GENERATE, use=use)]


def generate_prompts(service: Service, request: OllamaGenerate) -> list[Prompt]:
    request.check_context(service.context)
    if not request.prompt:
        return []
    if request.suffix or request.raw or service.template is None:
        if request.system:
            raise ApiError(400, "system: a raw prompt has no place for it", param="system")
        if request.think:
            raise ApiError(400, "think: a raw prompt says so itself", param="think")
        tokenizer = service.tokenizer
        if request.suffix:
            return [Prompt(infill_ids(tokenizer, request.prompt, request.suffix))]
        return [Prompt(tokenizer.encode(request.prompt, add_special=True, parse_special=True))]
    said = (("system", request.system), ("user", request.prompt))
    messages = [{"role": role, "content": content} for role, content in said if content]
    return [chat_prompt(service, messages, effort=request.effort)]


CHAT, GENERATE_PATH = "/api/chat", "/api/generate"
ROUTES = {
    CHAT: Route(OllamaChat, chat_prompts, partial(OllamaWriter, chat_piece), "ollama-"),
    GENERATE_PATH: Route(
        OllamaGenerate, generate_prompts, partial(OllamaWriter, generate_piece), "ollama-"
    ),
}
ASKING = {CHAT: "messages", GENERATE_PATH: "prompt"}
"""Fields without which nothing is generated."""
KEEPING = frozenset({*ASKING, "/api/embed", "/api/embeddings"})
"""Paths of requests that may say how long the model stays."""
SHOW = "/api/show"
KINDS = {SHOW: OllamaShow}
"""Bodies of what generates nothing."""

OWN_MODELS = "this server has the models it was started with"
NOT_HERE = {
    ("POST", "/api/pull"): f"{OWN_MODELS}; fetch others with `martlet pull MODEL`",
    ("POST", "/api/push"): f"{OWN_MODELS} and uploads nothing; use `hf upload`",
    ("POST", "/api/create"): f"{OWN_MODELS}; give `martlet serve` the path of a GGUF file",
    ("POST", "/api/copy"): f"{OWN_MODELS}; start it with `martlet serve MODEL --name NAME`",
    ("DELETE", "/api/delete"): f"{OWN_MODELS}; delete the file once the server has stopped",
    ("POST", "/api/blobs/{digest}"): f"{OWN_MODELS} and takes no files",
    ("HEAD", "/api/blobs/{digest}"): f"{OWN_MODELS} and takes no files",
}


def add_fixed_routes(app: FastAPI) -> None:
    """What is answered alike whatever models there are."""

    @app.api_route("/api/version", methods=["GET", "HEAD"])
    async def version() -> dict[str, str]:
        return {"version": API_VERSION}

    for (method, path), reason in NOT_HERE.items():
        endpoint = refusal(f"{path}: {reason}")
        app.add_api_route(path, endpoint, methods=[method], include_in_schema=False)


def add_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags() -> dict[str, Any]:
        return {"models": [listed(service.facts, name) for name in service.names]}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        return {"models": [running(service)]}

    @app.post(SHOW)
    async def show(request: Request) -> dict[str, Any]:
        asked, _ = read_request(service, OllamaShow, await request.body())
        assert isinstance(asked, OllamaShow)
        service.check_name(asked.name)
        return shown(service)


def refusal(message: str) -> Callable[[], Any]:
    async def endpoint() -> None:
        raise ApiError(400, message)

    return endpoint


def details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": facts.arch,
        "families": [facts.arch],
        "parameter_size": rounded(facts.n_params),
        "quantization_level": facts.quantization,
    }


def running(service: Service, stays_s: float = STAYS) -> dict[str, Any]:
    """stays_s: how long from now, if nobody asks for it."""
    loaded = {
        "size_vram": 0,
        "expires_at": rfc3339(min(time.time() + stays_s, NEVER_S)),
        "context_length": service.context,
    }
    return listed(service.facts, service.model_name) | loaded


def listed(facts: ModelFacts, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(facts.modified),
        "size": facts.n_bytes,
        "digest": facts.digest,
        "details": details(facts),
    }


def shown(service: Service) -> dict[str, Any]:
    facts, template = service.facts, service.template
    thinks = template is not None and template.thinking.shows
    return {
        "modelfile": "",
        "parameters": "",
        "template": template.source if template else "",
        "modified_at": rfc3339(facts.modified),
        "details": details(facts),
        "model_info": {
            "general.architecture": facts.arch,
            "general.parameter_count": facts.n_params,
            f"{facts.arch}.context_length": service.context or facts.context_train,
            f"{facts.arch}.embedding_length": facts.dim,
        },
        "capabilities": [
            *(["completion"] if "generate" in facts.abilities else []),
            *(["embedding"] if facts.abilities == {"embed"} else []),
            *(["tools"] if template else []),  # a template without them has them told
            *(["thinking"] if thinks else []),
            *(["insert"] if service.tokenizer.fim else []),
        ],
    }


def unloaded(path: str, name: str) -> dict[str, Any]:
    """The answer to who asks for nothing but that the model goes; streamed, it is one line."""
    piece = chat_piece("", "") if path == CHAT else generate_piece("", "")
    head = {"model": name, "created_at": rfc3339(time.time())}
    return {**head, **piece, "done": True, "done_reason": "unload"}


def rounded(n_params: int) -> str:
    """134515008 -> 134.52M"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n_params >= size:
            return f"{n_params / size:.2f}{unit}"
    return str(n_params)
