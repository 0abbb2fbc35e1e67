"""What is refused at the engine's door, with the numbers.

Owns: checks of prompt ids, lengths and terms of service. Must not know: queues, threads, sampling
ranges (SamplingParams checks its own values).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .constraint import Constraint
from .errors import ContextTooLong, RequestError
from .sampling import TokenIds
from .sampling_params import SamplingParams
from .service import SERVICES, Service


def checked_prompt(
    prompt_ids: Sequence[int], params: SamplingParams, *, vocab_size: int
) -> TokenIds:
    """The ids as int32. Native code indexes with them, so each must be in the vocabulary."""
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or not len(ids):
        raise RequestError("prompt is empty; it needs at least one token", field="prompt")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestError(
            f"prompt token ids must be integers from 0 to {vocab_size - 1}", field="prompt"
        )
    highest = max(params.logit_bias, default=0)
    named = {"logit_bias": highest, "stop_token_ids": max(params.stop_token_ids, default=0)}
    for field, token_id in named.items():
        if token_id >= vocab_size:
            raise RequestError(
                f"{field} names token {token_id}; the vocabulary ends at {vocab_size - 1}",
                field=field,
            )
    return ids.astype(np.int32)


def most_tokens(n_prompt: int, max_tokens: int | None, *, context: int, pool_slots: int) -> int:
    """The length a request may reach: prompt + completion <= context, and it fits the pool alone.

    Without max_tokens the pool's end is like the context's end. With it, a request that could be
    cut short by the pool is refused, as it could never get what it asks for.
    """
    n_least = 0 if max_tokens == 0 else 1  # of the output
    if n_prompt + n_least > context:
        raise ContextTooLong(
            f"prompt has {n_prompt} tokens, context is {context} and must hold {n_least} more for "
            "the output; shorten the prompt or start with a longer context",
            needed=n_prompt + n_least,
            limit=context,
        )
    pool_tokens = pool_slots + n_least  # the last token drawn is never computed: it needs no slot
    n_total = context if max_tokens is None else min(context, n_prompt + max_tokens)
    if max_tokens is None:
        n_total = min(n_total, max(pool_tokens, n_prompt + 1))
    if n_total > pool_tokens:
        raise ContextTooLong(
            f"prompt and output may reach {n_total} tokens, the KV pool holds {pool_tokens}; "
            "lower max_tokens or give the KV pool more memory",
            needed=n_total,
            limit=pool_tokens,
        )
    return n_total


def check_ability(params: SamplingParams, generates: bool) -> None:
    if not generates and not (params.embed or params.rank):
        raise RequestError(
            "this model does not generate text: it makes vectors or scores of it; ask for those, "
            "or start with a model that generates",
            field="model",
        )


def check_whole(n_prompt: int, step_rows: int | None) -> None:
    """step_rows: where a prompt must be computed in one step, the most rows that one has."""
    if step_rows is not None and n_prompt > step_rows:
        raise ContextTooLong(
            f"prompt has {n_prompt} tokens; each sees all others, so they are computed in one "
            f"step, which has {step_rows} rows; shorten the text or start with a longer context",
            needed=n_prompt,
            limit=step_rows,
        )


def check_constraint(constraint: Constraint | None, params: SamplingParams) -> None:
    for field in ("ignore_eos", "min_tokens", "stop_token_ids"):
        if constraint and getattr(params, field):
            raise RequestError(
                f"{field}: a constrained answer ends where its grammar ends; leave it out",
                field=field,
            )


def check_terms(service: Service, deadline_ms: float | None) -> None:
    if service not in SERVICES:
        raise RequestError(
            f"service is not one of {', '.join(SERVICES)}; leave it out for {SERVICES[0]}",
            field="service",
        )
    if deadline_ms is not None and not deadline_ms > 0:  # NaN fails as well
        raise RequestError(
            f"deadline_ms is {deadline_ms}; it must be a number above 0", field="deadline_ms"
        )
