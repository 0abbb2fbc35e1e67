"""From one row of logits to one token: a chain of small pure functions.

Owns: the filters, the draw, the keyed random numbers, logprobs. Must not know: batches, text, who
else is running. A token depends on (logits, params, the request's own tokens, seed, output
position) and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .constraint import Allowed, flags_of, is_allowed
from .errors import ModelError
from .events import TokenLogprob
from .sampling_params import SamplingParams

__all__ = [
    "SamplingParams",
    "Use",
    "kept_weights",
    "keyed_uniform",
    "sample",
    "token_logprob",
    "weighed",
]

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

Weights = npt.NDArray[np.float32]
"""Probabilities up to a factor, that of the best token being 1."""


class Drawer(Protocol):
    """What looks at whole rows: NumPy's way below, or an executor's own."""

    def __call__(
        self,
        logits: Logits,
        best: float,
        params: SamplingParams,
        uniform: float,
        allowed: Allowed | None = None,
    ) -> int:
        """Draws by temperature, top_p and min_p. best: the largest logit of those allowed."""
        ...

    def best(self, logits: Logits, allowed: Allowed) -> int | None:
        """The first of the best that are allowed; None where nothing is left to choose."""
        ...

    def mask(self, logits: Logits, allowed: Allowed) -> Logits:
        """A copy, -inf where a token is not allowed."""
        ...


# Vocabularies are searched for their best few by a bound over this many interleaved groups.
# There are more of them for more values, so that few others reach the bound.
LEAST_GROUPS, MOST_GROUPS, GROUPS_PER_VALUE = 1024, 8192, 16
# A place among many values is looked for by sums of runs first; so few are added up one by one.
FEW, RUN = 4096, 256

# ---- adjustments: float32 logits (vocab_size,) in, a new array out; -inf means "removed" --------


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


def weights_of(logits: Logits, best: float, temperature: float = 1.0) -> Weights:
    """best: the largest logit. A small temperature then gives 1 and 0, never inf - inf."""
    weights = logits - np.float32(best)
    if temperature != 1.0:
        weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


# ---- filters: logits or weights (n,) in, ascending places of the kept out; None: all of them -----


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


def top_p_places(weights: Weights, p: float) -> Places | None:
    """The fewest best tokens that hold probability p together; the one that crosses stays."""
    if p == 1.0:
        return None
    total = float(weights.sum(dtype=np.float64))  # in float32 a sum over 262k would drift
    # All that are lighter than this hold less than 1 - p together, so the others suffice.
    near = np.flatnonzero(weights >= (1.0 - p) * total / len(weights) * (1.0 - 1e-6))
    values = weights[near]
    edge, n_equal = _edge(values, p * total)
    kept = np.flatnonzero(values >= edge)
    ties = np.flatnonzero(values[kept] == edge)
    return near[np.delete(kept, ties[n_equal:]) if len(ties) > n_equal else kept]


def _edge(values: Weights, needed: float) -> tuple[float, int]:
    """The least of the fewest best values that sum to `needed`, and how many equal to it belong.

    No sort: values in 0 … 1 are ordered as their 30 bits are. The masses under equal leading ten
    bits tell where the edge lies, then those under the next ten among these, then the last ten.
    """
    needed = max(needed, 1e-300)  # p = 0 asks for one token as well
    above = 0.0  # sum of the values that are beyond the edge for certain
    bits = values.view(np.uint32)
    for shift in (20, 10, 0):
        keys = ((bits >> np.uint32(shift)) & np.uint32(1023)).astype(np.intp)
        reached = above + np.cumsum(np.bincount(keys, weights=values, minlength=1024)[::-1])
        # Rounding may leave the last sum short of what is needed: then the least value is the edge.
        at = int(np.searchsorted(reached, min(needed, reached[-1])))
        above = float(reached[at - 1]) if at else above
        inside = keys == 1023 - at
        bits, values = bits[inside], values[inside]
    edge = float(values[0])
    return edge, min(len(values), max(1, math.ceil((needed - above) / edge)))


def min_p_places(weights: Weights, p: float) -> Places | None:
    """Tokens at least p times as likely as the best."""
    return None if p == 0.0 else np.flatnonzero(weights >= p)


def _near_best(values: npt.NDArray[Any], n: int) -> Places:
    """Ascending places of at least the n largest values, with all their equals; no sort.

    n groups have a maximum of at least the n-th largest group maximum, hence so have n values: a
    bound that costs one pass, and that few other values reach.
    """
    n_groups = min(max(LEAST_GROUPS, GROUPS_PER_VALUE * n), MOST_GROUPS)
    n_per_group = len(values) // n_groups
    if n > n_groups or n_per_group < 2:
        return np.flatnonzero(values >= np.partition(values, -n)[-n])
    groups = values[: n_per_group * n_groups].reshape(n_per_group, n_groups).max(axis=0)
    return np.flatnonzero(values >= np.partition(groups, -n)[-n])


# ---- the choice ----------------------------------------------------------------------------------


def draw(weights: Weights, uniform: float) -> int:
    """The place whose share of the cumulated weight holds `uniform`, in id order.

    Among many the run of neighbours that holds it is found first: adding up one by one is slow.
    """
    if len(weights) <= FEW:
        shares = np.cumsum(weights, dtype=np.float64)
        return _place(shares, uniform * shares[-1])
    n_whole = len(weights) // RUN * RUN
    sums = weights[:n_whole].reshape(-1, RUN).sum(axis=1, dtype=np.float64)
    shares = np.cumsum(np.append(sums, weights[n_whole:].sum(dtype=np.float64)))
    target = uniform * shares[-1]
    run = _place(shares, target)
    before, start = shares[run - 1] if run else 0.0, run * RUN
    inside = before + np.cumsum(weights[start : start + RUN], dtype=np.float64)
    return start + _place(inside, target)


def _place(shares: npt.NDArray[np.float64], target: float) -> int:
    at = int(np.searchsorted(shares, target, side="right"))
    # Rounding may put the target on the very end: then the last place with any weight.
    return min(at, int(np.searchsorted(shares, shares[-1])))


class Use(IntEnum):
    """What a random number of a position is for; each has one of its own."""

    TOKEN = 0
    COIN = 1  # whether a guess stands
    INSTEAD = 2  # what is drawn where it does not
    GUESS = 3


def keyed_uniform(seed: int, position: int, use: Use = Use.TOKEN) -> float:
    """A number in [0, 1) from (seed, output position, use) alone: no state, so no order of draws.

    Philox is counter-based, four words for every count; its raw words are part of NumPy's stability
    promise, while the distributions of Generator are not.
    """
    words = np.random.Philox(key=seed, counter=position).random_raw(1 + use)
    return float(int(words[use]) >> 11) * 2.0**-53


class NumpyDrawer:
    """The meaning of every Drawer."""

    def __call__(
        self,
        logits: Logits,
        best: float,
        params: SamplingParams,
        uniform: float,
        allowed: Allowed | None = None,
    ) -> int:
        logits = logits if allowed is None else self.mask(logits, allowed)
        weights, ids = self.kept(logits, best, params)
        place = draw(weights, uniform)
        return place if ids is None else int(ids[place])

    def kept(
        self, logits: Logits, best: float, params: SamplingParams
    ) -> tuple[Weights, Places | None]:
        """What temperature, top_p and min_p leave, and where it stands among the logits (None: all
        of them)."""
        weights, ids = weights_of(logits, best, params.temperature), None
        filters: tuple[tuple[Callable[[Weights, float], Places | None], float], ...] = (
            (top_p_places, params.top_p),
            (min_p_places, params.min_p),
        )
        for places_of, value in filters:  # each sees what the one before has left
            places = places_of(weights, value)
            if places is not None:
                weights, ids = weights[places], places if ids is None else ids[places]
        return weights, ids

    def best(self, logits: Logits, allowed: Allowed) -> int | None:
        kept = self.mask(logits, allowed)
        best_id = int(kept.argmax())
        return best_id if kept[best_id] > -math.inf else None

    def mask(self, logits: Logits, allowed: Allowed) -> Logits:
        return np.where(flags_of(allowed, len(logits)), logits, np.float32(-np.inf))


NUMPY = NumpyDrawer()


def sample(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    n_prompt: int,
    tokens: TokenIds,
    allowed: Allowed | None = None,
    best_id: int | None = None,
    drawer: Drawer = NUMPY,
) -> int:
    """The next token after `tokens` (prompt, then output).

    best_id: the first of the largest logits, where it is known.
    Raises ModelError when the logits hold NaN, or when nothing is left to choose.
    """
    n_output = len(tokens) - n_prompt
    left = _candidates(logits, params, n_prompt, tokens, allowed, best_id, drawer)
    if params.is_greedy:
        return left.best_id
    logits, allowed, best = left.logits, left.allowed, float(left.logits[left.best_id])
    uniform = keyed_uniform(seed, n_output)
    if allowed is not None and params.top_k:
        logits, allowed = drawer.mask(logits, allowed), None
    ids = top_k_places(logits, params.top_k)
    if ids is None:
        return drawer(logits, best, params, uniform, allowed)
    return int(ids[drawer(logits[ids], best, params, uniform)])


def weighed(
    logits: Logits,
    params: SamplingParams,
    *,
    n_prompt: int,
    tokens: TokenIds,
    allowed: Allowed | None = None,
    best_id: int | None = None,
) -> tuple[Weights, Places | None]:
    """What `sample` draws from where it is not greedy, by weight, and which tokens these are (None:
    all). Raises as it does."""
    left = _candidates(logits, params, n_prompt, tokens, allowed, best_id, NUMPY)
    logits = left.logits if left.allowed is None else NUMPY.mask(left.logits, left.allowed)
    return kept_weights(logits, left.best_id, params)


def kept_weights(
    logits: Logits, best_id: int, params: SamplingParams
) -> tuple[Weights, Places | None]:
    """The same of logits that are adjusted and masked already."""
    ids = top_k_places(logits, params.top_k)
    kept = logits if ids is None else logits[ids]
    weights, places = NUMPY.kept(kept, float(logits[best_id]), params)
    return weights, ids if places is None else places if ids is None else ids[places]


class _Candidates(NamedTuple):
    logits: Logits
    allowed: Allowed | None
    """None: all, or the others are -inf."""
    best_id: int


def _candidates(
    logits: Logits,
    params: SamplingParams,
    n_prompt: int,
    tokens: TokenIds,
    allowed: Allowed | None,
    best_id: int | None,
    drawer: Drawer,
) -> _Candidates:
    """Adjusted logits, which of them may be, and the first of the best of these."""
    n_output = len(tokens) - n_prompt
    if best_id is None:
        best_id = int(logits.argmax())  # NaN counts as the largest, so it is found here
    _check_best(float(logits[best_id]), n_output)
    if params.adjusts:
        if allowed is not None:  # first, so that no bias brings back what is not allowed
            logits, allowed = drawer.mask(logits, allowed), None
        logits = _adjusted(logits, params, n_prompt, tokens)
        best_id = int(logits.argmax())
    elif allowed is not None and not is_allowed(allowed, best_id):
        best_id = drawer.best(logits, allowed)
        if best_id is None:
            raise ModelError(f"nothing allowed is left at output token {n_output}")
    _check_best(float(logits[best_id]), n_output)
    return _Candidates(logits, allowed, best_id)


def _check_best(best: float, n_output: int) -> None:
    if not math.isfinite(best):
        raise ModelError(f"best logit is {best} at output token {n_output}; cannot choose")


def _adjusted(logits: Logits, params: SamplingParams, n_prompt: int, tokens: TokenIds) -> Logits:
    logits = apply_bias(logits, *params.bias)
    logits = apply_repetition_penalty(logits, tokens, params.repetition_penalty)
    return apply_count_penalties(
        logits, tokens[n_prompt:], params.presence_penalty, params.frequency_penalty
    )


def token_logprob(logits: Logits, token_id: int, n_top: int) -> TokenLogprob:
    """Log-softmax of raw model logits (vocab_size,), for the token and the n_top best."""
    best = float(logits.max())
    total = best + math.log(float(weights_of(logits, best).sum(dtype=np.float64)))
    places = top_k_places(logits, n_top) if n_top else np.empty(0, np.intp)
    ids = np.arange(len(logits)) if places is None else places
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple(
        (i, logit - total) for i, logit in zip(ids.tolist(), logits[ids].tolist(), strict=True)
    )
    return TokenLogprob(float(logits[token_id]) - total, top)
