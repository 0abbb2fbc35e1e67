"""Texts as vectors, for every dialect that asks for them.

Owns: how many of a request's texts are with the engine at a time, norms, fewer dimensions. Must
not know: dialects, how a prompt becomes a vector (runtime/pooling.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import Request

from ..runtime.pooling import Hidden
from ..runtime.sampling_params import SamplingParams
from .answer import Choice
from .bridge import Ask, Job, Terms
from .connection import unless_gone
from .errors import late, refused
from .generate import submit, within
from .ids import new_id
from .service import Service
from .stream import finished

GROUP = 16  # prompts of one request that the engine has at a time, so that others find a place
MAX_INPUTS = 2048
PARAMS = SamplingParams(embed=True, max_tokens=0)


@dataclass(frozen=True)
class Vectors:
    rows: list[Hidden]
    """(dim,) each, of length 1."""
    n_tokens: int


def text_ids(service: Service, texts: Sequence[str], field: str) -> list[list[int]]:
    """Texts never become control tokens; the model's own are put around them."""
    tokenizer = service.tokenizer
    prompts = [tokenizer.encode(text, add_special=True, parse_special=False) for text in texts]
    if not all(prompts):
        raise refused(f"{field}: a text has no tokens", param=field)
    return prompts


async def vectors_of(
    service: Service,
    request: Request,
    prompts: Sequence[Sequence[int]],
    terms: Terms,
    dimensions: int | None,
) -> Vectors:
    """Raises ApiError and typed errors; ClientGone when nobody waits any more."""
    rows = await rows_of(service, request, [Ask(prompt, PARAMS, terms) for prompt in prompts])
    return Vectors([unit(row, dimensions) for row in rows], sum(map(len, prompts)))


async def rows_of(service: Service, request: Request, asks: Sequence[Ask]) -> list[Hidden]:
    """What the engine makes of each prompt, in order; all are on the terms of the first."""
    start_s, rows = time.monotonic(), list[Hidden]()
    for at in range(0, len(asks), GROUP):
        terms = within(asks[0].terms, service.options.max_request_s)
        left = _with_time_left(terms, time.monotonic() - start_s)
        group = [ask._replace(terms=left) for ask in asks[at : at + GROUP]]
        rows += await unless_gone(request.receive, _group(service, group))
    return rows


def _with_time_left(terms: Terms, spent_s: float) -> Terms:
    if terms.deadline_ms is None:
        return terms
    left_ms = terms.deadline_ms - round(spent_s * 1000)
    if left_ms <= 0:
        raise late(f"the deadline of {terms.deadline_ms} ms passed between two texts")
    return terms._replace(deadline_ms=left_ms)


async def _group(service: Service, asks: Sequence[Ask]) -> list[Hidden]:
    choices = [Choice(i, i, len(ask.prompt_ids)) for i, ask in enumerate(asks)]
    watch = service.metrics.watch(False)
    name = "embd-" + new_id()
    job = Job(service.engine, name, watch, service.courier, service.options.max_unread)
    try:
        submit(job, asks)
        await finished(job, choices, service.options.patience)
    finally:
        job.cancel()
    return [choice.embedding for choice in choices if choice.embedding is not None]


def unit(vector: Hidden, dimensions: int | None) -> Hidden:
    """Its first `dimensions` values, scaled to length 1."""
    if dimensions is not None and dimensions > len(vector):
        reason = f"dimensions is {dimensions}, the model's vectors have {len(vector)}"
        raise refused(reason, param="dimensions")
    wide = vector[:dimensions].astype(np.float64)
    length = float(np.sqrt((wide * wide).sum()))
    scaled: Hidden = (wide / length if length > 0 else wide).astype(np.float32)
    return scaled
