"""How likely the model finds a prompt, token by token, taken down while the prompt is computed.

Owns: which row tells about which token, and how many such rows a step may have. Must not know:
requests, steps, text. The logits of a row are read at once and given up: memory does not grow with
prompt x vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from .errors import ModelError
from .events import TokenLogprob
from .sampling import Logits, TokenIds, token_logprob

STEP_BYTES = 64 << 20  # of one step's logits: a large vocabulary gets fewer rows per step


def scored_rows(vocab_size: int) -> int:
    """Most rows of a step whose logits are read for scores."""
    return max(1, STEP_BYTES // (4 * vocab_size))


@dataclass
class PromptScores:
    """Of one prompt. Each row is read alone, so neighbours and chunks leave no trace."""

    n_top: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's second token, third, …: the first follows nothing."""

    def read(self, rows: Logits, prompt: TokenIds, place: int) -> None:
        """rows (n, vocab_size) after the tokens at `place` and following; beyond the prompt's end
        there is nothing to score."""
        targets = prompt[place + 1 :].tolist()
        for row, token_id in zip(rows, targets, strict=False):
            assert place == len(self.logprobs), "a row was left out, or came twice"
            place += 1
            self.logprobs.append(self._score(row, token_id, place))

    def _score(self, row: Logits, token_id: int, place: int) -> TokenLogprob:
        found = token_logprob(row, token_id, self.n_top)
        if not math.isfinite(found.logprob):
            raise ModelError(f"prompt token {place} has the logprob {found.logprob}; cannot score")
        rank = int(np.count_nonzero(row > row[token_id])) + 1
        return replace(found, rank=rank)
