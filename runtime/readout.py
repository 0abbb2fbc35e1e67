"""What a step's results are read for: whose rows they are, and what the prompt's own tell.

Owns: the split of logits and hidden states by request. Must not know: how tokens are drawn, who is
told. Laid out before a step is committed, read after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from .drafts import Draft
from .errors import ModelError
from .events import PromptEvent
from .pooling import Hidden, Pooled, pooling_of, ranking_of
from .prompt_scores import PromptScores
from .request import Request, Scheduled
from .sampling import Logits
from .sampling_params import SamplingParams


class Readers(NamedTuple):
    """What takes down what is asked of a prompt."""

    scores: PromptScores | None
    pooled: Pooled | None

    @classmethod
    def of(
        cls, params: SamplingParams, n_prompt: int, pooling_type: int, sees_ahead: bool
    ) -> Readers:
        """Raises RequestError where the model's file asks for a pooling that is none."""
        n_top = params.prompt_logprobs
        scores = None if n_top is None else PromptScores(n_top)
        if params.rank:
            return cls(scores, Pooled(ranking_of(pooling_type, sees_ahead), n_prompt))
        return cls(scores, Pooled(pooling_of(pooling_type), n_prompt) if params.embed else None)

    @property
    def read_cache(self) -> bool:
        """Whether they can do without rows that the prefix cache would spare."""
        return self.scores is None and (self.pooled is None or self.pooled.reads_cache)


class Read(NamedTuple):
    """What a step gave one request."""

    request: Request
    logits: Logits
    hidden: Hidden
    best_ids: Sequence[int]
    """Of each row that may lead to a token, the last ones, the first of the best logits: a row for
    the last token it owns, and one for each that was guessed."""
    draft: Draft
    draws: bool
    """All rows of its tokens are computed, so the last one may lead to a token."""


class Reads:
    def __init__(self, granted: Sequence[Scheduled], drafts: Sequence[Draft]) -> None:
        self._items = [
            (item.request, item.n_out, item.n_hidden, draft, item.wants_logits)
            for item, draft in zip(granted, drafts, strict=True)
            if item.n_out or item.n_hidden or item.wants_logits
        ]

    def check(self, logits: Logits, hidden: Hidden) -> None:
        n_out = sum(item[1] for item in self._items)
        if len(logits) != n_out:
            raise ModelError(f"executor gave {len(logits)} rows of logits, not {n_out}")
        n_hidden = sum(item[2] for item in self._items)
        if len(hidden) != n_hidden:
            raise ModelError(f"executor gave {len(hidden)} hidden states, not {n_hidden}")

    def split(self, logits: Logits, hidden: Hidden) -> Iterator[Read]:
        best_ids = self._best_of_drawn(logits)
        out_at = hidden_at = 0
        for (request, n_out, n_hidden, draft, draws), best in zip(
            self._items, best_ids, strict=True
        ):
            rows = logits[out_at : out_at + n_out], hidden[hidden_at : hidden_at + n_hidden]
            out_at, hidden_at = out_at + n_out, hidden_at + n_hidden
            yield Read(request, *rows, best, draft, draws)

    def _best_of_drawn(self, logits: Logits) -> list[list[int]]:
        """One search for all: a call of NumPy costs as much as the search in a small vocabulary."""
        counts = [
            1 + len(draft.tokens) if draws and n_out else 0
            for _, n_out, _, draft, draws in self._items
        ]
        ends = list(accumulate(item[1] for item in self._items))
        if sum(counts) < len(logits):  # rows of prompts are read for other ends
            drawn = [at for n, end in zip(counts, ends, strict=True) for at in range(end - n, end)]
            logits = logits[drawn]
        found = iter(logits.argmax(axis=1).tolist() if len(logits) else ())
        return [list(islice(found, n)) for n in counts]


def read_prompt(read: Read) -> PromptEvent | None:
    """Takes down what the rows tell of the prompt; what was asked, once it is all there."""
    request = read.request
    if request.n_output:
        return None
    if request.scores is not None:
        place = request.n_computed - len(read.logits)
        request.scores.read(read.logits, request.prompt, place)
        return PromptEvent(logprobs=tuple(request.scores.logprobs)) if read.draws else None
    if request.pooled is not None:
        request.pooled.read(read.hidden)
        return PromptEvent(embedding=request.pooled.vector()) if read.draws else None
    return None
