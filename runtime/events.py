"""What the engine tells the owner of a request.

Owns: the event records. Must not know: how events travel (server), who makes them (engine), what
the figures of a request mean (latency).

All events of a request are passed to its `on_event` from the engine thread, in order; the last
one is always exactly one FinishEvent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .latency import Timings
from .prefix_index import Miss
from .service import Service

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "deadline", "error")


@dataclass(frozen=True)
class DraftCounts:
    drafted: int = 0
    """Tokens that were guessed and checked."""
    accepted: int = 0
    """Those that were right: output tokens that took no step of their own."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)

    @classmethod
    def total(cls, counts: Iterable[DraftCounts]) -> DraftCounts:
        return sum(counts, cls())


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities.

    Taken from the raw logits, before bias, penalties, temperature and filters (as OpenAI and vLLM
    report them), so a token that top-k would have removed can still be listed.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, best first, lower id first among equals."""
    rank: int | None = None
    """1 for the likeliest of all; only prompt tokens are ranked."""


@dataclass(frozen=True)
class TokenEvent:
    """One output token. An end-of-generation token has an event too, with text ""."""

    index: int
    """0 for the first output token."""
    token_id: int
    text: str
    """Text that may be shown now: "" while bytes or a possible stop string are held back."""
    logprob: TokenLogprob | None
    time_ns: int
    """time.monotonic_ns when the token was drawn."""


@dataclass(frozen=True)
class PromptEvent:
    """What was asked about the prompt itself; before the first token, for those who asked only."""

    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the prompt's second token and each one after it."""
    embedding: npt.NDArray[np.float32] | None = None
    """(dim,) the prompt as a vector, of any length."""
    text: str = ""


@dataclass(frozen=True)
class Trace:
    """How a request was served: what its times do not tell. For the operator, not for clients."""

    service: Service = "interactive"
    n_prefill_steps: int = 0
    """Steps with rows of it before its first token: the chunks of its prompt."""
    n_preempted: int = 0
    n_recomputed: int = 0
    """Rows computed again after preemptions."""
    miss: Miss | None = None
    """Why its prefix hit ended where it did; None for a whole hit, and before admission."""


@dataclass(frozen=True)
class FinishEvent:
    """The end of a request, whatever the reason."""

    reason: FinishReason
    text: str
    """The last held-back text; to be shown after the text of the token events."""
    timings: Timings
    error: str | None
    """One line for reasons "error" and "deadline"; None otherwise."""
    n_prompt: int
    n_output: int
    """Drawn tokens: an end-of-generation token and tokens hidden by a stop string count."""
    n_cached: int
    """Prompt tokens that were not computed because the prefix cache held them."""
    seed: int
    """The given seed, or the one chosen when none was given; it reproduces the output."""
    trace: Trace = Trace()
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    """By who has guessed."""


Event: TypeAlias = TokenEvent | PromptEvent | FinishEvent
