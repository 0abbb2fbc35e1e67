"""The mathematics of comparing two models' predictions, token by token and over a text.
Owns the formulas; must not know where log-probabilities come from or how a result is shown.

Definitions are llama-perplexity's (tools/perplexity/perplexity.cpp of llama.cpp); its errors treat
tokens as independent, `error` here treats chunks so (see bootstrap.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from martlet.scripts.bootstrap import Difference, paired, standard_errors

TOKEN_SCORES = np.dtype(
    [
        ("target", np.int32),
        ("kl", np.float64),  # KL(base || test), nats
        ("nll_base", np.float64),  # -ln p of the target
        ("nll", np.float64),
        ("same_top", np.bool_),  # both prefer the same token
    ]
)
QUANTILES = {"p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-probabilities of (n, vocab) logits."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def token_scores(
    log_p: np.ndarray, log_q: np.ndarray, targets: np.ndarray, floor: float = -math.inf
) -> np.ndarray:
    """TOKEN_SCORES (n) from float64 log-probabilities (n, vocab) of base and test.
    Tokens the base gives at most exp(floor) are left out of the divergence."""
    scores = np.empty(len(targets), TOKEN_SCORES)
    p = np.exp(log_p)
    counted = (log_p > floor) & (p > 0)  # where p is 0, the term is 0 whatever q is
    terms = np.subtract(log_p, log_q, out=np.zeros_like(p), where=counted)
    scores["kl"] = np.einsum("ij,ij->i", p, terms)
    rows = np.arange(len(targets))
    scores["target"] = targets
    scores["nll_base"], scores["nll"] = -log_p[rows, targets], -log_q[rows, targets]
    scores["same_top"] = log_p.argmax(axis=1) == log_q.argmax(axis=1)
    return scores


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """One standard error, by bootstrap over chunks; NaN with one chunk."""
    token_error: float
    """The same as llama-perplexity gives it, as if tokens were independent."""


@dataclass(frozen=True)
class Divergence:
    """How far a test's predictions are from a base's, over the scored tokens of a text.

    KL divergence in nats per token; Δp is the change of the target's probability."""

    mean_kl: Estimate
    median_kl: float
    quantiles_kl: dict[str, float]  # by the names of QUANTILES
    max_kl: float
    same_top: Estimate
    perplexity_base: Estimate
    perplexity: Estimate
    perplexity_change: Estimate
    ln_perplexity_ratio: Estimate
    rms_dp: Estimate
    n_chunks: int
    n_scored: int

    @classmethod
    def of(cls, scores: np.ndarray) -> Divergence:
        """scores: TOKEN_SCORES (n_chunks, scored tokens of a chunk)."""
        kl = scores["kl"].ravel()
        errors = standard_errors(columns(scores).mean(axis=1), values_of)
        values = values_of(columns(scores).mean(axis=(0, 1)))
        by_token = token_errors(columns(scores).reshape(kl.size, -1), values)
        estimates = {
            name: Estimate(float(value), float(error), by_token[name])
            for name, value, error in zip(MEASURES, values, errors, strict=True)
        }
        return cls(
            **estimates,
            median_kl=float(np.median(kl)),
            quantiles_kl={name: float(np.quantile(kl, q)) for name, q in QUANTILES.items()},
            max_kl=float(kl.max()),
            n_chunks=scores.shape[0],
            n_scored=kl.size,
        )


def columns(scores: np.ndarray) -> np.ndarray:
    """What is averaged: float64 (…, 5) of kl, same_top, nll_base, nll, Δp²."""
    dp = np.exp(-scores["nll"]) - np.exp(-scores["nll_base"])
    fields = [scores["kl"], scores["same_top"], scores["nll_base"], scores["nll"], dp**2]
    return np.stack([np.asarray(field, np.float64) for field in fields], axis=-1)


# From averages (…, 5) in the order of `columns`.
MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean_kl": lambda m: m[..., 0],
    "same_top": lambda m: m[..., 1],
    "perplexity_base": lambda m: np.exp(m[..., 2]),
    "perplexity": lambda m: np.exp(m[..., 3]),
    "perplexity_change": lambda m: np.exp(m[..., 3]) - np.exp(m[..., 2]),
    "ln_perplexity_ratio": lambda m: m[..., 3] - m[..., 2],
    "rms_dp": lambda m: np.sqrt(m[..., 4]),
}


def values_of(means: np.ndarray) -> np.ndarray:
    """(…, 5) to (…, number of MEASURES)."""
    return np.stack([measure(means) for measure in MEASURES.values()], axis=-1)


def token_errors(tokens: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Standard errors as if tokens were independent: (n, 5) columns propagated to first order."""
    n = len(tokens)
    if n < 2:
        return dict.fromkeys(MEASURES, math.nan)
    value = dict(zip(MEASURES, values, strict=True))
    kl, top, nll_base, nll, dp2 = tokens.T
    rms = value["rms_dp"]
    linear = {
        "mean_kl": kl,
        "same_top": top,
        "perplexity_base": value["perplexity_base"] * nll_base,
        "perplexity": value["perplexity"] * nll,
        "perplexity_change": value["perplexity"] * nll - value["perplexity_base"] * nll_base,
        "ln_perplexity_ratio": nll - nll_base,
        "rms_dp": dp2 / (2 * rms) if rms else dp2,
    }
    return {name: float(linear[name].std()) / math.sqrt(n - 1) for name in MEASURES}


# From averages (…, 2 x 5) of the first test and another one.
DIFFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean_kl": lambda m: m[..., 5] - m[..., 0],
    "mean_kl_ratio": lambda m: m[..., 5] / m[..., 0] - 1,
    "same_top": lambda m: m[..., 6] - m[..., 1],
    "ln_perplexity_ratio": lambda m: m[..., 8] - m[..., 3],
}


def paired_differences(scores: Sequence[np.ndarray]) -> list[dict[str, Difference]]:
    """Of each later test to the first, by the names of DIFFERENCES; over the same chunks, so that
    what makes a passage hard for both cancels out."""
    means = [columns(each).mean(axis=1) for each in scores]
    return [
        {
            name: paired(np.concatenate([means[0], other], axis=1), measure)
            for name, measure in DIFFERENCES.items()
        }
        for other in means[1:]
    ]
