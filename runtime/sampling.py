"""From one row of logits to one token: a chain of small pure functions.

Owns: the filters, the draw, the keyed random numbers, logprobs. Must not know: batches, text, who
else is running. A token depends on (logits, params, the request's own tokens, seed, output
position) and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ModelError
from .events import TokenLogprob
from .sampling_params import SamplingParams

__all__ = ["SamplingParams", "keyed_uniform", "sample", "token_logprob"]

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]
Allowed = npt.NDArray[np.bool_]

# Vocabularies are searched for their best few by a bound over this many interleaved groups.
N_GROUPS = 8192

# ---- adjustments: float32 logits (vocab_size,) in, a new array out; -inf means "removed" --------


def apply_mask(logits: Logits, allowed: Allowed | None) -> Logits:
    """Keep what a constraint allows: allowed is (vocab_size,), or None for everything."""
    return logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))


def apply_bias(logits: Logits, ids: Places, values: Logits) -> Logits:
    """ids (n,) all different, values (n,)."""
    if not len(ids):
        return logits
    logits = logits.copy()
    logits[ids] += values
    return logits


def apply_repetition_penalty(logits: Logits, seen: TokenIds, penalty: float) -> Logits:
    """Every token of `seen` becomes less likely, once, however often it occurs (CTRL, eq. 3.2)."""
    if penalty == 1.0 or not len(seen):
        return logits
    logits, ids = logits.copy(), np.unique(seen)
    chosen = logits[ids]
    logits[ids] = np.where(chosen > 0, chosen / np.float32(penalty), chosen * np.float32(penalty))
    return logits


def apply_count_penalties(
    logits: Logits, output: TokenIds, presence: float, frequency: float
) -> Logits:
    """OpenAI's rule: minus presence once, minus frequency per occurrence, over the output."""
    if (presence == 0.0 and frequency == 0.0) or not len(output):
        return logits
    logits = logits.copy()
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)
    return logits


def apply_temperature(logits: Logits, temperature: float) -> Logits:
    # Relative to the best first: a small temperature then gives 0 and -inf, never inf - inf.
    return logits if temperature == 1.0 else (logits - logits.max()) / np.float32(temperature)


# ---- filters: logits (n,) in, ascending places of the kept ones out, None for all of them --------


def top_k_places(logits: Logits, k: int) -> Places | None:
    """The k best; among equals at the edge the lower ids."""
    if k == 0 or k >= len(logits):
        return None
    near = _near_best(logits, k)
    values = logits[near]
    edge = np.partition(values, -k)[-k]
    ties = near[values == edge]
    above = near[values > edge]
    return np.sort(np.concatenate((above, ties[: k - len(above)])))


def top_p_places(logits: Logits, p: float) -> Places | None:
    """The fewest best tokens that hold probability p together; the one that crosses stays."""
    if p == 1.0:
        return None
    weights = _weights(logits)
    needed = p * weights.sum()
    n_near, near = 0, np.empty(0, np.intp)
    while len(near) < len(weights) and weights[near].sum() <= needed:
        n_near = min(max(8 * n_near, 512), len(weights))
        near = _near_best(weights, n_near)
    best_first = near[np.argsort(-weights[near], kind="stable")]
    n_kept = int(np.searchsorted(np.cumsum(weights[best_first]), needed)) + 1
    return np.sort(best_first[:n_kept])


def min_p_places(logits: Logits, p: float) -> Places | None:
    """Tokens at least p times as likely as the best."""
    return None if p == 0.0 else np.flatnonzero(_weights(logits) >= p)


def _near_best(values: npt.NDArray[Any], n: int) -> Places:
    """Ascending places of at least the n largest values, with all their equals; no sort.

    n groups have a maximum of at least the n-th largest group maximum, hence so have n values: a
    bound that costs one pass, and that few other values reach.
    """
    n_per_group = len(values) // N_GROUPS
    if n > N_GROUPS or n_per_group < 2:
        return np.flatnonzero(values >= np.partition(values, -n)[-n])
    groups = values[: n_per_group * N_GROUPS].reshape(n_per_group, N_GROUPS).max(axis=0)
    return np.flatnonzero(values >= np.partition(groups, -n)[-n])


def _weights(logits: Logits) -> npt.NDArray[np.float64]:
    """Probabilities up to a factor, the best being 1: float64, or sums over 262k would drift."""
    return np.exp(logits - logits.max()).astype(np.float64)


# ---- the choice ----------------------------------------------------------------------------------


def draw(logits: Logits, uniform: float) -> int:
    """The place whose share of the cumulated probability holds `uniform`, in id order."""
    shares = np.cumsum(_weights(logits))
    at = int(np.searchsorted(shares, uniform * shares[-1], side="right"))
    # Rounding may put the product on the very end: then the last place with any weight.
    return min(at, int(np.searchsorted(shares, shares[-1])))


def keyed_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, output position) alone: no state, so no order of draws.

    Philox is counter-based; its raw words are part of NumPy's stability promise, while the
    distributions of Generator are not. Further draws at a position may use the next words.
    """
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(word) >> 11) * 2.0**-53


def sample(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    n_prompt: int,
    tokens: TokenIds,
    allowed: Allowed | None = None,
) -> int:
    """The next token after `tokens` (prompt, then output).

    Raises ModelError when the logits hold NaN, or when nothing is left to choose.
    """
    output = tokens[n_prompt:]
    logits = apply_mask(logits, allowed)
    logits = apply_bias(logits, *params.bias)
    logits = apply_repetition_penalty(logits, tokens, params.repetition_penalty)
    logits = apply_count_penalties(
        logits, output, params.presence_penalty, params.frequency_penalty
    )
    best = int(np.argmax(logits))  # NaN counts as the largest, so it is found here
    if not np.isfinite(logits[best]):
        raise ModelError(
            f"best logit is {logits[best]} at output token {len(output)}; cannot choose"
        )
    if params.is_greedy:
        return best
    logits = apply_temperature(logits, params.temperature)
    logits, ids = _filter(logits, params)
    place = draw(logits, keyed_uniform(seed, len(output)))
    return place if ids is None else int(ids[place])


def _filter(logits: Logits, params: SamplingParams) -> tuple[Logits, Places | None]:
    """The surviving logits and their token ids (None: all survive), each filter seeing fewer."""
    filters: tuple[tuple[Callable[[Logits, Any], Places | None], float], ...] = (
        (top_k_places, params.top_k),
        (top_p_places, params.top_p),
        (min_p_places, params.min_p),
    )
    ids: Places | None = None
    for places_of, value in filters:
        places = places_of(logits, value)
        if places is not None:
            logits, ids = logits[places], places if ids is None else ids[places]
    return logits, ids


def token_logprob(logits: Logits, token_id: int, n_top: int) -> TokenLogprob:
    """Log-softmax of raw model logits (vocab_size,), for the token and the n_top best."""
    shifted = logits.astype(np.float64) - float(logits.max())
    log_total = np.log(np.exp(shifted).sum())
    places = top_k_places(logits, n_top) if n_top else np.empty(0, np.intp)
    ids = np.arange(len(logits)) if places is None else places
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple((int(i), float(shifted[i] - log_total)) for i in ids)
    return TokenLogprob(float(shifted[token_id] - log_total), top)
