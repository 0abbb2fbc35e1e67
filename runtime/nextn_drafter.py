"""A model's own block that predicts further tokens (MTP, `nextn`), as what guesses.

Owns: keys and values of that block for each request, and the hidden states it has not read yet.
Must not know: whether guesses pay, how they are checked; the block's plan is models/nextn.py.

The block's row t takes token t + 1 and the model's hidden state of row t, which comes by beside the
logits as the model computes that row. So it reads what the model has computed for certain; from the
last row on it goes on with its own guesses and its own hidden states, one token at a time, in rows
that the next guess writes over. Of a prompt it reads the last REACH tokens, when it first guesses:
its positions begin there, as those of its layer only tell distances. Rows whose hidden states did
not pass by (of a prefix that was known) end what it can read; it begins anew behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .draft_model import draft_of
from .draft_rows import FEW_ROWS, OwnBlocks, Rows, step_of
from .draft_words import Words, guess_of
from .drafts import NO_DRAFT, Draft
from .model import Model
from .pooling import Hidden
from .rejection import Guess
from .request import Request
from .step_costs import StepCosts

REACH = 256
"""Tokens before the end of a prompt from which on it is read."""


@dataclass
class _Known:
    """What passed by of a request: hidden states of rows `first` … end - 1 of the model."""

    first: int
    n_read: int = 0  # of them the block has computed its rows for so many
    unread: list[Hidden] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def n_unread(self) -> int:
        return sum(map(len, self.unread))

    @property
    def end(self) -> int:
        return self.first + self.n_read + self.n_unread

    def cut(self, end: int) -> None:
        """Forgets rows from `end` on: of guesses that were wrong. None of them was read."""
        while self.unread and self.end > end:
            n_too_many = self.end - end
            last = self.unread.pop()
            if len(last) > n_too_many:
                self.unread.append(last[: len(last) - n_too_many])


class NextnDrafter:
    name = "mtp"
    priors: tuple[float, ...] = (0.8,)
    reach = REACH

    def __init__(self, model: Model, words: Words | None = None) -> None:
        """The model must have such a block. words: the tokens that are guessed; None: all. Closing
        the model closes what this uses of it."""
        plan, self._executor = model.open_nextn(words)
        self._words = words
        self._n_words = model.tokenizer.vocab_size if words is None else len(words)
        self._blocks = OwnBlocks(self._executor)
        self._known: dict[str, _Known] = {}
        self._costs = StepCosts.measure(self._executor, given_width=plan.given_width)

    def token_seconds(self, n_requests: int) -> float:
        return self._costs.of(n_requests)

    def forget(self, request: Request) -> None:
        if known := self._known.pop(request.id, None):
            self._blocks.give_back(known.blocks)

    def see(self, request: Request, first: int, hidden: Hidden) -> None:
        """Hidden states of the model's rows from `first` on, before a token is drawn from them."""
        known = self._known.setdefault(request.id, _Known(first))
        known.cut(request.n_tokens - 1)
        if first > known.end:
            known = self._begin_anew(request, first)
        n_known = known.end - first  # computed again, to the same bits
        if n_known < len(hidden):
            known.unread.append(hidden[n_known:])
        if known.n_unread > REACH:
            rows = np.concatenate(known.unread)[-REACH:]
            known = self._begin_anew(request, known.end - REACH)
            known.unread.append(rows)

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        able = [request for request in requests if self._is_ready(request, most)]
        able = able[: self._executor.max_rows // FEW_ROWS]
        if not able:
            return [NO_DRAFT] * len(requests)
        known = [self._known[request.id] for request in able]
        for request, one in zip(able, known, strict=True):
            while one.n_unread > FEW_ROWS:
                n = min(one.n_unread - 1, self._executor.max_rows)
                self._read([request], [one], n, wants=False)
        logits = self._read(able, known, FEW_ROWS, wants=True)
        drafts: dict[str, list[Guess]] = {request.id: [] for request in able}
        for n in range(most):
            for request, row in zip(able, logits[:, : self._n_words], strict=True):
                drafts[request.id].append(guess_of(request, row, n, self._words))
            if n + 1 == most:
                break
            rows = [
                Rows(one.blocks, one.n_read + n, [drafts[request.id][-1].token])
                for request, one in zip(able, known, strict=True)
            ]
            logits = self._executor.run(step_of(rows, self._executor.hidden, wants=True))
        return [draft_of(drafts.get(request.id, ())) for request in requests]

    def _begin_anew(self, request: Request, first: int) -> _Known:
        self.forget(request)
        self._known[request.id] = _Known(first)
        return self._known[request.id]

    def _is_ready(self, request: Request, most: int) -> bool:
        """All that leads to the last token is there, and blocks for it and the guesses behind."""
        known = self._known.get(request.id)
        if known is None:
            return False
        known.cut(request.n_tokens - 1)
        if not known.unread or known.end != request.n_tokens - 1:
            return False
        if not self._blocks.grow(known.blocks, known.end - known.first + most):
            self.forget(request)  # its blocks are for others; it begins anew when there is room
            return False
        return True

    def _read(
        self, requests: Sequence[Request], known: Sequence[_Known], n: int, *, wants: bool
    ) -> np.ndarray:
        """Up to n rows of each; wants: the logits of each one's last row."""
        sequences, given = [], []
        for request, one in zip(requests, known, strict=True):
            unread = np.concatenate(one.unread)
            at = one.first + one.n_read + 1  # the token that goes with the first of them
            tokens = request.tokens[at : at + min(n, len(unread))].tolist()
            sequences.append(Rows(one.blocks, one.n_read, tokens))
            given.append(unread[: len(tokens)])
            one.n_read += len(tokens)
            one.unread = [unread[len(tokens) :]] if len(unread) > len(tokens) else []
        return self._executor.run(step_of(sequences, np.concatenate(given), wants=wants))


def own_drafter(model: Model, wish: str, words: Words | None = None) -> NextnDrafter | None:
    """The model's own block, if it has one and this wish, as of speculation_of, lets it guess.
    words: the tokens that it guesses; None: all."""
    can_guess = bool(model.config.nextn) and model.config.generates
    return NextnDrafter(model, words) if can_guess and wish != "off" else None
