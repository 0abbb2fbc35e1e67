"""OpenAI's embeddings: their request and their answer.

Owns: the route /v1/embeddings. Must not know: how texts become vectors (vectors.py), the engine.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator

from ..runtime.pooling import Hidden
from .asking import Asked, Positive
from .errors import refused
from .fields import ELSEWHERE, FieldRules, Refused
from .generate import ignored_header, read_request
from .schema import Prompts, check_token_id, prompt_list
from .service import Service
from .vectors import MAX_INPUTS, Vectors, text_ids, vectors_of

PATH = "/v1/embeddings"
# Some clients send ids of OpenAI's vocabulary unasked, which would give vectors of nonsense.
WHOSE_IDS = (
    "input: token ids would be read in this model's own vocabulary; if they are of it, send "
    '"accept_ids": true, else send text (LangChain: check_embedding_ctx_length=False)'
)


class EmbeddingsRequest(Asked):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={
            "truncate_prompt_tokens": Refused("a text that is too long is refused, never cut"),
            "pooling": Refused("the model's file says how it pools"),
            "embd_normalize": Refused("vectors have the length 1", (2,)),
            "normalize": Refused("vectors have the length 1", (True,)),
            "messages": Refused("use input"),
            "content": Refused("use input"),
            "priority": Refused(ELSEWHERE, (0,)),
        },
        no_effect=frozenset({"user", "metadata"}),
    )

    input: Annotated[
        list[Any],
        BeforeValidator(
            lambda value: prompt_list(value, MAX_INPUTS), json_schema_input_type=Prompts
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    accept_ids: bool = False


def input_ids(service: Service, request: EmbeddingsRequest) -> list[list[int]]:
    if isinstance(request.input[0], str):
        return text_ids(service, request.input, "input")
    if not request.accept_ids:
        raise refused(WHOSE_IDS, param="input")
    for prompt in request.input:
        if not prompt:
            raise refused("input: a list of ids is empty", param="input")
        for token_id in prompt:
            check_token_id(token_id, service.tokenizer.vocab_size, "input")
    return request.input


def body_of(request: EmbeddingsRequest, model: str, found: Vectors) -> dict[str, Any]:
    def written(vector: Hidden) -> str | list[float]:
        if request.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": written(vector)}
            for index, vector in enumerate(found.rows)
        ],
        "model": model,
        "usage": {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens},
    }


async def embed(service: Service, http: Request) -> Response:
    body, tenant = await http.body(), getattr(http.state, "tenant", b"")

    def prepared() -> tuple[EmbeddingsRequest, list[str], list[list[int]]]:
        request, ignored = read_request(service, EmbeddingsRequest, body)
        service.check_able("embed")
        return request, ignored, input_ids(service, request)

    request, ignored, prompts = await asyncio.to_thread(prepared)
    terms = service.adapted(request.terms(tenant), request.model)
    found = await vectors_of(
        service,
        http,
        prompts,
        terms,
        request.dimensions,
    )
    answer = body_of(request, request.model or service.model_name, found)
    return JSONResponse(answer, headers=ignored_header(ignored))
