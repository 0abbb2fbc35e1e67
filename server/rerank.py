"""Texts ranked by what they say to a query: the request and answer that Jina's, Cohere's and
llama-server's clients share.

Owns: the routes /v1/rerank and /rerank, how a query and a text become one prompt, and a score of
labels. Must not know: how a prompt becomes labels, the engine.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator

from ..runtime.pooling import Hidden
from ..runtime.sampling_params import SamplingParams
from ..runtime.tokenizer import Tokenizer
from .asking import Asked, Positive
from .bridge import Ask
from .errors import refused
from .fields import ELSEWHERE, FieldRules, Refused
from .generate import ignored_header, read_request
from .ids import new_id
from .service import Service
from .vectors import MAX_INPUTS, rows_of

PATHS = ("/v1/rerank", "/rerank")
PARAMS = SamplingParams(rank=True, max_tokens=0)
QUERY, DOCUMENT = "{query}", "{document}"  # where a file's template has them
_PLACES = re.compile(rf"({re.escape(QUERY)}|{re.escape(DOCUMENT)})")
NEVER_CUT = "a text that is too long is refused, never cut"


def _documents(value: Any) -> Any:
    texts = [item.get("text") if isinstance(item, dict) else item for item in _listed(value)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a list of strings, or of objects with a text")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"{len(texts)} documents, at most {MAX_INPUTS} in one request")
    return texts


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


class RerankRequest(Asked):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={
            "max_tokens_per_doc": Refused(NEVER_CUT),
            "max_chunks_per_doc": Refused(NEVER_CUT),
            "truncate_prompt_tokens": Refused(NEVER_CUT),
            "truncation": Refused(NEVER_CUT, (False,)),
            "texts": Refused("use documents"),
            "priority": Refused(ELSEWHERE, (0,)),
        },
        no_effect=frozenset({"user", "metadata"}),
    )

    query: str
    documents: Annotated[
        list[str],
        BeforeValidator(_documents, json_schema_input_type=list[str | dict[str, Any]]),
    ]
    top_n: Positive | None = None
    return_documents: bool = False


class Pair(NamedTuple):
    """A query and a text as one prompt."""

    ids: list[int]
    second_at: int | None
    """Where the text begins, in models that tell the two apart."""


def pair_of(tokenizer: Tokenizer, query: str, text: str) -> Pair:
    """As the file's template has it, else [BOS query end SEP text end] of what the model adds."""
    if tokenizer.rerank_template is not None:
        pieces = [*_filled(tokenizer.rerank_template, query, text)]
        return Pair(tokenizer.with_single_bos(tokenizer.encode_parts(pieces)), None)
    begin, end, separator = (
        [id_] if is_added and id_ is not None else []
        for is_added, id_ in (
            (tokenizer.add_bos, tokenizer.bos_id),
            (tokenizer.add_eos, tokenizer.eos_id),
            (tokenizer.add_sep, tokenizer.sep_id),
        )
    )
    first = [*begin, *tokenizer.encode_content(query), *end, *separator]
    second = [*tokenizer.encode_content(text), *(end or separator)]
    return Pair([*first, *second], len(first))


def _filled(template: str, query: str, text: str) -> Iterator[tuple[str, bool]]:
    """Pieces and whether they are a user's, each place of the template filled once."""
    values = {QUERY: query, DOCUMENT: text}
    for piece in _PLACES.split(template):
        yield values.get(piece, piece), piece in values


def score_of(labels: Hidden) -> float:
    """Of one label its value, as the classifier gives it; of two, yes and no, the share of yes."""
    if len(labels) > 2:
        raise refused(f"this model's classifier has {len(labels)} labels, so it ranks no texts")
    if len(labels) == 1:
        return float(labels[0])
    return 1 / (1 + math.exp(min(700.0, float(labels[1]) - float(labels[0]))))


async def rerank(service: Service, http: Request) -> Response:
    body, tenant = await http.body(), getattr(http.state, "tenant", b"")

    def prepared() -> tuple[RerankRequest, list[str], list[Ask]]:
        request, ignored = read_request(service, RerankRequest, body)
        service.check_able("rank")
        terms = service.adapted(request.terms(tenant), request.model)
        pairs = [pair_of(service.tokenizer, request.query, text) for text in request.documents]
        asks = [Ask(pair.ids, PARAMS, terms, second_at=pair.second_at) for pair in pairs]
        return request, ignored, asks

    request, ignored, asks = await asyncio.to_thread(prepared)
    scores = [score_of(labels) for labels in await rows_of(service, http, asks)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n]
    n_tokens = sum(len(ask.prompt_ids) for ask in asks)
    answer = {
        "id": "rerank-" + new_id(),
        "object": "list",
        "model": request.model or service.model_name,
        "results": [_result(request, i, scores[i]) for i in order],
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
    return JSONResponse(answer, headers=ignored_header(ignored))


def _result(request: RerankRequest, index: int, score: float) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": score}
    if request.return_documents:
        result["document"] = {"text": request.documents[index]}
    return result
