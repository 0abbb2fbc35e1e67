"""A row of logits becomes the next token of a request: its event, and whether it is the last one.

Owns: what is done with a drawn token, and why it ends its request. Must not know: steps, other
requests, how tokens are drawn (sampling.py).
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np

from .events import FinishReason, TokenEvent
from .rejection import Distribution, Guess, settle
from .request import Request
from .sampling import (
    Drawer,
    Logits,
    Use,
    keyed_uniform,
    sample,
    token_logprob,
    weighed,
)
from .sampling_params import SamplingParams
from .stats import Counts
from .vocabulary import Vocabulary


class Drawn(NamedTuple):
    event: TokenEvent
    ends_by: FinishReason | None
    """None: more tokens follow."""


def draw_token(
    request: Request,
    logits: Logits,
    best_id: int,
    *,
    tokenizer: Vocabulary,
    drawer: Drawer,
    counts: Counts,
    guess: Guess | None = None,
) -> Drawn:
    """The request owns one token more. logits (vocab_size,); best_id: the first of the best.
    guess: what is taken if it may count as a draw (rejection.py)."""
    params, constraint = request.params, request.constraint
    ends = ends_of(params, tokenizer)
    may_end = request.n_output >= params.min_tokens
    raw = logits
    if not may_end:
        logits, best_id = without(logits, ends)
    asked: dict[str, Any] = {
        "n_prompt": request.n_prompt,
        "tokens": request.tokens,
        "allowed": counts.timed_mask(constraint) if constraint else None,
        "best_id": best_id,
    }
    if guess is None or params.is_greedy:  # then the best token is drawn, whatever was guessed
        token_id = sample(logits, params, seed=request.seed, drawer=drawer, **asked)
    else:
        weights, ids = weighed(logits, params, **asked)
        coin, instead = (
            keyed_uniform(request.seed, request.n_output, use) for use in (Use.COIN, Use.INSTEAD)
        )
        token_id = settle(guess, Distribution(ids, weights), coin, instead)
    if constraint:
        constraint.accept(token_id)
    logprob = None if params.logprobs is None else token_logprob(raw, token_id, params.logprobs)
    is_end = token_id in ends
    text = "" if is_end else request.text.push(token_id, may_stop=may_end)
    now_ns = time.monotonic_ns()
    if request.first_token_ns is None:
        request.first_token_ns = now_ns
    request.append(token_id)
    counts.decoded += 1
    event = TokenEvent(request.n_output - 1, token_id, text, logprob, now_ns)
    if is_end or request.text.stopped or (constraint and constraint.is_done):
        return Drawn(event, "stop")
    return Drawn(event, "length" if request.is_full else None)


def ends_of(params: SamplingParams, tokenizer: Vocabulary) -> Set[int]:
    """The tokens that end an answer."""
    of_model: Set[int] = frozenset() if params.ignore_eos else tokenizer.eog_ids
    return of_model | frozenset(params.stop_token_ids) if params.stop_token_ids else of_model


def without(logits: Logits, ids: Set[int]) -> tuple[Logits, int]:
    """A copy in which they cannot be drawn, and its best token."""
    logits = logits.copy()
    logits[list(ids)] = -np.inf
    return logits, int(logits.argmax())
