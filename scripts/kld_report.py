"""What `martlet kld` and `martlet divergence` say, as JSON and as tables for people.
Owns names and wording; must not know how anything was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from martlet.scripts.console import plain_console
from martlet.scripts.logit_stats import QUANTILES, Divergence, Estimate, paired_differences

if TYPE_CHECKING:
    from martlet.scripts.bootstrap import Difference
    from martlet.scripts.comparison import Comparison

MEASURED = {
    "f32": "what the file lost: float activations on both sides",
    "bf16": "what file and arithmetic lose together, as served with bf16 activations",
    "int8": "what file and arithmetic lose together, as served with int8 activations",
}
FEW_CHUNKS = 20  # whose spread is itself known to a sixth: 1 / sqrt(2 (n - 1))
ERRORS = "± is one standard error, by bootstrap over chunks; differences have their 95 % interval"
EXACT = "logits of both sides are computed here and compared in float64"
SIXTEEN_BITS = (
    "the base is read with 16 bits per log-probability, and as its program computed it; tokens"
    " below exp(-16) are left out, as llama-perplexity does"
)


def measured(found: Comparison) -> str:
    names = [test["activations"] for test in found.tests]
    return MEASURED[names[0]] if names else ""


def precision(found: Comparison) -> str:
    return EXACT if found.base["kind"] == "model" else SIXTEEN_BITS


def scope(result: Divergence, n_ctx: int) -> str:
    few = "; so few chunks make rough errors" if result.n_chunks < FEW_CHUNKS else ""
    return f"{result.n_chunks} chunks of {n_ctx}, {result.n_scored:,} tokens scored{few}"


def as_json(found: Comparison) -> dict[str, Any]:
    results = [Divergence.of(scores) for scores in found.scores]
    differences = paired_differences(found.scores)
    tests = []
    for i, (facts, result) in enumerate(zip(found.tests, results, strict=True)):
        paired = {name: asdict(value) for name, value in differences[i - 1].items()} if i else None
        tests.append({**facts, **asdict(result), "minus_first": paired})
    return {
        "measured": measured(found),
        "precision": precision(found),
        "errors": ERRORS,
        "n_ctx": found.n_ctx,
        "base": found.base,
        "tests": tests,
    }


def show(found: Comparison) -> None:
    from rich.table import Table

    console = plain_console()
    results = [Divergence.of(scores) for scores in found.scores]
    console.print(f"base  {named(found.base)}")
    for letter, test in zip(letters(results), found.tests, strict=True):
        console.print(f"{letter:4}  {named(test)}")
    console.print(scope(results[0], found.n_ctx))
    console.print(f"measured: {measured(found)}; {precision(found)}")
    console.print(f"{ERRORS}\n")
    table = Table("", box=None, pad_edge=False)
    for letter in letters(results):
        table.add_column(letter, justify="right")
    for label, cell in ROWS.items():
        table.add_row(label, *(cell(result) for result in results))
    console.print(table)
    if len(results) > 1:
        console.print("\npaired over the same chunks, minus test 1 (95 % interval):")
    for letter, found_for in zip(
        letters(results)[1:], paired_differences(found.scores), strict=True
    ):
        console.print(difference_line(letter, found_for))


def named(facts: dict[str, Any]) -> str:
    if facts.get("kind") == "base logits":
        return f"{facts['file']} (base logits)"
    return f"{facts['model']} ({arithmetic(facts)})"


def arithmetic(facts: dict[str, Any]) -> str:
    executor = "/".join(filter(None, [facts["executor"], facts["isa"]]))
    return f"{facts['activations']} activations, {facts['kv_type']} cache, {executor}"


def letters(items: Sequence[Any]) -> list[str]:
    return [f"test {i + 1}" if len(items) > 1 else "test" for i in range(len(items))]


def estimate_text(estimate: Estimate, digits: int, scale: float = 1, unit: str = "") -> str:
    value, error = scale * estimate.value, scale * estimate.error
    return f"{value:.{digits}f} ± {error:.{digits}f}{unit}"


def quantile(name: str, divergence: Divergence) -> str:
    return f"{divergence.quantiles_kl[name]:.5f}"


ROWS: dict[str, Callable[[Divergence], str]] = {
    "mean KL divergence": lambda d: estimate_text(d.mean_kl, 6),
    "median": lambda d: f"{d.median_kl:.6f}",
    **{f"{100 * q:g} %": partial(quantile, name) for name, q in QUANTILES.items()},
    "maximum": lambda d: f"{d.max_kl:.4f}",
    "same top token": lambda d: estimate_text(d.same_top, 2, 100, " %"),
    "perplexity of the base": lambda d: estimate_text(d.perplexity_base, 4),
    "perplexity": lambda d: estimate_text(d.perplexity, 4),
    "its change": lambda d: estimate_text(d.perplexity_change, 4),
    "ln of the ratio": lambda d: estimate_text(d.ln_perplexity_ratio, 6),
    "RMS Δp": lambda d: estimate_text(d.rms_dp, 3, 100, " %"),
}


def difference_line(name: str, found: dict[str, Difference]) -> str:
    """All figures of one later test, with their intervals."""
    kl, ratio = interval(found["mean_kl"], 6), interval(found["mean_kl_ratio"], 1, 100)
    top = interval(found["same_top"], 2, 100)
    return (
        f"{name} is {verdict(found['mean_kl'])}: mean KL {kl}, in % {ratio}; same top token in"
        f" percentage points {top}"
    )


def interval(difference: Difference, digits: int, scale: float = 1) -> str:
    low, high = scale * difference.low, scale * difference.high
    return f"{scale * difference.value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def verdict(difference: Difference) -> str:
    if not difference.is_clear:
        return "as far from the base as the error allows to tell"
    return "closer to the base" if difference.value < 0 else "farther from the base"
