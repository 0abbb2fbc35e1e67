"""What a request may ask of sampling and stopping, and the ranges that are accepted.

Owns: SamplingParams. Must not know: logits (sampling.py), HTTP field names (server).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import RequestError

SEED_BITS = 64
# A seed we choose stays below 2**53, so that it survives a JSON reader that has only doubles.
CHOSEN_SEED_BITS = 53
MAX_LOGPROBS = 256
# Below this, dividing by the temperature leaves nothing but the best token: treated as greedy.
MIN_TEMPERATURE = 1e-5

MAX_INT = 2**31 - 1

# field -> (smallest, largest), both allowed
REAL_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (0.01, 100.0),
    }
)
# field -> (smallest, largest, may be None)
INTEGER_RANGES: Mapping[str, tuple[int, int, bool]] = MappingProxyType(
    {
        "top_k": (0, MAX_INT, False),
        "min_tokens": (0, MAX_INT, False),
        "seed": (0, 2**SEED_BITS - 1, True),
        "max_tokens": (0, MAX_INT, True),
        "logprobs": (0, MAX_LOGPROBS, True),
        "prompt_logprobs": (0, MAX_LOGPROBS, True),
    }
)
BIAS_RANGE = (-100.0, 100.0)
RULES = ("match", "reject")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Defaults change nothing about the model's law.

    Chain: constraint mask -> logit_bias -> penalties -> temperature -> top_k -> top_p -> min_p ->
    draw. Off values: top_k 0, top_p 1, min_p 0, penalties 0 (repetition 1). Temperature 0 takes the
    best token (the lowest id among equals). top_p 0 also leaves only the best.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """0 … 2**64 - 1; 0 is a seed like any other. None: one is chosen and reported."""
    max_tokens: int | None = None
    """Most output tokens; None runs to the end of the context. 0 where the prompt is scored."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """So many output tokens are drawn before one that ends the answer may be, and stop strings are
    looked for in the text of those behind them."""
    stop_token_ids: tuple[int, ...] = ()
    """They end the answer as the model's own end tokens do, and show as no text."""
    logprobs: int | None = None
    """Number of alternatives to report with each token; 0 reports only the token's own."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt; what the prefix cache holds is then computed again."""
    embed: bool = False
    """The prompt as one vector, and no output: max_tokens is 0."""
    rank: bool = False
    """The prompt as a classifier's scores, in the same way."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    """Subtracted once from every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of every token in prompt or output."""
    speculate_rule: str | None = None
    """When a guessed token stands, one of RULES; None: as the engine is told (speculation.py)."""

    def __post_init__(self) -> None:
        for name, (low, high) in REAL_RANGES.items():
            _check_real(name, getattr(self, name), low, high)
        for name, (least, most, may_be_none) in INTEGER_RANGES.items():
            value = getattr(self, name)
            if value is not None or not may_be_none:
                _check_integer(name, value, least, most)
        is_read = self.embed or self.rank
        if self.max_tokens == 0 and self.prompt_logprobs is None and not is_read:
            raise RequestError(
                "max_tokens is 0 and the prompt is not scored, so nothing is asked; it must be 1 "
                "at least",
                field="max_tokens",
            )
        if is_read and (self.max_tokens != 0 or self.prompt_logprobs is not None):
            reason = "an embedded prompt is neither continued nor scored; max_tokens must be 0"
            raise RequestError(reason, field="max_tokens")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise RequestError("stop must be a tuple of strings", field="stop")
        if "" in self.stop:
            raise RequestError("stop contains an empty string; leave it out", field="stop")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}; "
                "lower it",
                field="min_tokens",
            )
        if self.speculate_rule not in (None, *RULES):
            raise RequestError(
                f"speculate_rule is {_shown(self.speculate_rule)}; it must be one of "
                f"{', '.join(RULES)}",
                field="speculate_rule",
            )
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0, MAX_INT)
            _check_real("logit_bias", bias, *BIAS_RANGE)

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @cached_property
    def adjusts(self) -> bool:
        """Whether anything but the temperature changes the logits."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    @cached_property
    def bias(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """logit_bias as (token ids, values): it may name every token, and is asked per token."""
        n = len(self.logit_bias)
        ids = np.fromiter(self.logit_bias.keys(), np.intp, n)
        return ids, np.fromiter(self.logit_bias.values(), np.float32, n)


def _check_real(name: str, value: Any, low: float, high: float) -> None:
    # bool is an int to Python, but "temperature": true is a mistake. NaN fails the comparison.
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:
        raise RequestError(
            f"{name} is {_shown(value)}; it must be a number from {low} to {high}", field=name
        )


def _check_integer(name: str, value: Any, least: int, most: int) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        raise RequestError(
            f"{name} is {_shown(value)}; it must be an integer from {least} to {most}", field=name
        )


def _shown(value: Any) -> str:
    """A short form: errors must not echo a megabyte back, nor choke on a huge integer."""
    if isinstance(value, int) and abs(value) > 2**128:
        return "a very large integer"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
