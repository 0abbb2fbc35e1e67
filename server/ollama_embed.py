"""Ollama's two ways to ask for vectors.

Owns: /api/embed (several texts) and /api/embeddings (one, the older way). Must not know: how texts
become vectors (vectors.py), the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator

from .asking import Asked, Fields, Positive
from .fields import FieldRules, Refused
from .generate import ignored_header, read_request
from .ollama_schema import NEVER_CUT, Kept, OllamaOptions
from .service import Service
from .vectors import MAX_INPUTS, Vectors, text_ids, vectors_of

RULES = FieldRules(
    refused={"truncate": Refused(NEVER_CUT, (True, False))},  # true is what Ollama's client sends
)


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"{len(texts)} texts, at most {MAX_INPUTS} in one request")
    return texts


class OllamaEmbed(Kept):
    RULES: ClassVar[FieldRules] = RULES
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {"options": OllamaOptions}

    input: Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])]
    dimensions: Positive | None = None
    options: OllamaOptions = OllamaOptions()


class OllamaEmbeddings(Kept):
    RULES: ClassVar[FieldRules] = RULES
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {"options": OllamaOptions}

    prompt: str
    options: OllamaOptions = OllamaOptions()


async def embed(service: Service, http: Request) -> Response:
    start_ns = time.monotonic_ns()
    request, ignored, found = await _vectors(service, http, OllamaEmbed, "input")
    answer = {
        "model": request.model or service.model_name,
        "embeddings": [row.tolist() for row in found.rows],
        "total_duration": time.monotonic_ns() - start_ns,
        "load_duration": 0,
        "prompt_eval_count": found.n_tokens,
    }
    return JSONResponse(answer, headers=ignored_header(ignored))


async def embeddings(service: Service, http: Request) -> Response:
    _, ignored, found = await _vectors(service, http, OllamaEmbeddings, "prompt")
    rows = [row.tolist() for row in found.rows]
    return JSONResponse({"embedding": rows[0] if rows else []}, headers=ignored_header(ignored))


async def _vectors(
    service: Service, http: Request, kind: type[Asked], field: str
) -> tuple[Asked, list[str], Vectors]:
    body, tenant = await http.body(), getattr(http.state, "tenant", b"")

    def prepared() -> tuple[Asked, list[str], list[list[int]]]:
        request, ignored = read_request(service, kind, body)
        service.check_able("embed")
        given = getattr(request, field)
        texts = [given] if isinstance(given, str) else given
        # Without a text the model is only to be there.
        return request, ignored, text_ids(service, texts, field) if any(texts) else []

    request, ignored, prompts = await asyncio.to_thread(prepared)
    dimensions = getattr(request, "dimensions", None)
    terms = service.adapted(request.terms(tenant), request.model)
    found = await vectors_of(service, http, prompts, terms, dimensions)
    return request, ignored, found
