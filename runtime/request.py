"""One request: the tokens it owns, how many of them are computed, and its stamps.

Owns: the state of a request between steps. Must not know: who else is running, how rows or blocks
are granted (scheduler, kv_blocks), how logits become tokens (sampling).

There is no prefill or decode state. A request owns n_tokens (prompt, then output), n_computed of
them have keys and values, and each step lets the second number catch up with the first. A prefix
hit starts it higher; preemption sets it back to 0. Neither touches the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .block_table import BlockTable
from .constraint import Constraint
from .events import DraftCounts, Event, FinishEvent, FinishReason, Trace
from .latency import NS_PER_MS, Timings
from .pooling import Pooled
from .prefix_index import Miss
from .prompt_scores import PromptScores
from .sampling_params import SamplingParams
from .service import Place, Service
from .textstream import TextStream


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Written by the engine thread alone; other threads may read `id`, `seed` and `n_prompt`."""

    id: str
    arrival: int
    """Rises by one per submitted request; preemption does not change it."""
    buffer: npt.NDArray[np.int32]
    """(max_tokens_total,) prompt, output so far, and room for the rest."""
    n_prompt: int
    params: SamplingParams
    seed: int
    on_event: Callable[[Event], None]
    text: TextStream
    table: BlockTable
    arrived_ns: int
    constraint: Constraint | None = None
    reads_cache: bool = True
    """False computes every row, as reports on the prompt's own rows need."""
    scores: PromptScores | None = None
    """Where the logprobs of the prompt's own tokens are taken down, if they are asked for."""
    pooled: Pooled | None = None
    """Where the prompt becomes a vector, if that is all that is asked for."""
    second_at: int | None = None
    """Where the second of two texts begins, if the prompt consists of two."""
    service: Service = "interactive"
    deadline_ms: float | None = None
    """From arrival. A request that is unfinished then ends with reason "deadline"."""
    rejects: bool = False
    """Guesses stand by the rule of rejection.py, not where they are what is drawn."""
    adapters: tuple[float, ...] = ()
    """How much it gets of each adapter of the model. Its table's salt tells requests apart."""
    seen_from: int | None = None
    """The first token whose hidden state is shown to what guesses; None: nobody looks."""

    state: State = State.WAITING
    place: Place | None = None
    """In line, from its arrival at the scheduler on; smaller goes first, and is preempted last."""
    n_tokens: int = field(init=False)
    n_computed: int = 0
    n_ever_computed: int = 0
    """Highest n_computed so far: rows below it are recomputed after a preemption."""
    n_cached: int = 0
    miss: Miss | None = None
    """Why the prefix hit ended where it did; None before admission and for a whole hit."""
    marks: set[int] = field(default_factory=set)
    """Tokens behind which others are known to go on differently: states are kept there."""
    n_preempted: int = 0
    n_recomputed: int = 0
    n_prefill_steps: int = 0
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    scheduled_ns: int | None = None
    first_token_ns: int | None = None

    def __post_init__(self) -> None:
        self.n_tokens = self.n_prompt

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(n_tokens,) a view: prompt, then output."""
        return self.buffer[: self.n_tokens]

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """(n_prompt,) a view."""
        return self.buffer[: self.n_prompt]

    @cached_property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts that may share."""
        salt = hashlib.blake2b(self.table.salt).digest()
        return hashlib.blake2b(self.prompt.tobytes(), key=salt, digest_size=16).digest()

    @property
    def n_output(self) -> int:
        return self.n_tokens - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Rows still to compute before the next token can be drawn; 1 while decoding."""
        return self.n_tokens - self.n_computed

    @property
    def is_streaming(self) -> bool:
        """Its owner has seen a token and waits for the next, which takes one row."""
        return self.n_pending == 1 and self.n_output > 0

    @property
    def is_full(self) -> bool:
        """No room for another token: max_tokens or the end of the context is reached."""
        return self.n_tokens == len(self.buffer)

    def is_late(self, now_ns: int) -> bool:
        if self.deadline_ms is None:
            return False
        return now_ns - self.arrived_ns >= self.deadline_ms * NS_PER_MS

    def late_words(self) -> str:
        """What to tell its owner of that."""
        done = f"{self.n_output} output tokens"
        if not self.n_output:
            done = f"{self.n_computed} of {self.n_prompt} prompt tokens"
        return (
            f"the deadline of {self.deadline_ms:g} ms passed after {done}; allow more time or ask "
            "for less"
        )

    def count_draft(self, source: str, drafted: int, accepted: int) -> None:
        before = self.drafts.get(source, DraftCounts())
        self.drafts[source] = before + DraftCounts(drafted, accepted)

    def append(self, token_id: int) -> None:
        self.buffer[self.n_tokens] = token_id
        self.n_tokens += 1

    def ending(self, reason: FinishReason, end_ns: int, error: str | None) -> FinishEvent:
        """The record of the request, and the text that was held back."""
        return FinishEvent(
            reason=reason,
            text="" if self.text.stopped else self.text.finish(),
            timings=Timings.from_stamps(
                arrived=self.arrived_ns,
                scheduled=self.scheduled_ns,
                first_token=self.first_token_ns,
                end=end_ns,
                n_output=self.n_output,
            ),
            error=error,
            n_prompt=self.n_prompt,
            n_output=self.n_output,
            n_cached=self.n_cached,
            drafts=dict(self.drafts),
            seed=self.seed,
            trace=Trace(
                service=self.service,
                n_prefill_steps=self.n_prefill_steps,
                n_preempted=self.n_preempted,
                n_recomputed=self.n_recomputed,
                miss=self.miss,
            ),
        )


@dataclass(frozen=True)
class Scheduled:
    """Rows granted to a request for one step: its tokens n_computed … n_computed + n_rows - 1."""

    request: Request
    n_rows: int
    n_draft: int = 0
    """Of these rows the last so many are of tokens that are only guessed: they lie in the buffer
    behind those the request owns."""

    @property
    def wants_logits(self) -> bool:
        """Only the last owned token leads to a new one; read this before the step is committed."""
        return self.n_owned == self.request.n_pending

    @property
    def n_owned(self) -> int:
        return self.n_rows - self.n_draft

    @property
    def n_out(self) -> int:
        """Of the last so many rows the logits are read: of the one that leads to a token, and where
        the prompt is scored of each one that is computed for the first time."""
        request = self.request
        if request.pooled is not None:
            return 0
        n_new = 0 if request.scores is None else self._end - self._first_new
        return max(n_new, int(self.wants_logits) + self.n_draft)

    @property
    def n_hidden(self) -> int:
        """The same for hidden states."""
        pooled, seen_from = self.request.pooled, self.request.seen_from
        n_needed = 0 if pooled is None else pooled.n_rows(self._first_new, self._end)
        if seen_from is not None:
            n_needed = self._end - max(self.request.n_computed, seen_from)
        return max(0, n_needed)

    @property
    def first_hidden(self) -> int:
        """The place in the request of the first of them."""
        return self._end - self.n_hidden

    @property
    def _end(self) -> int:
        return self.request.n_computed + self.n_rows

    @property
    def _first_new(self) -> int:
        """The first token whose row was never computed before; beyond the end if all were."""
        return max(self.request.n_computed, self.request.n_ever_computed)
