"""A smaller model of the same vocabulary that guesses what a larger one says.

Owns: the small model's keys and values of each request, kept in step with what the request owns.
Must not know: whether guesses pay, how they are checked.

It guesses its own likeliest token; where guesses stand by the rule of rejection.py, one that is
drawn from what it says at the request's temperature. After a guess it has computed rows of tokens
that were perhaps not drawn: the next guess begins where the two texts part, and writes over the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .draft_rows import FEW_ROWS, OwnBlocks, Rows, step_of
from .draft_words import guess_of
from .drafts import NO_DRAFT, Draft
from .errors import RequestError, UnsupportedError
from .model import Model
from .pooling import Hidden
from .rejection import Guess
from .request import Request
from .step_costs import StepCosts
from .tokenizer import Tokenizer

_FIRST_WORD = 5  # control tokens before it may be called otherwise
_MOST_EXTRA = 128  # tokens by which the vocabularies may differ in size: padding


@dataclass
class _Read:
    """What the small model has computed of a request."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    n_owned: int = 0  # tokens that are no guesses

    def keep_common(self, tokens: npt.NDArray[np.int32]) -> None:
        """Forgets guesses from the first one on that the request does not own, and in any case its
        last token: its row gives the next one."""
        n = min(len(self.tokens), len(tokens) - 1)
        at = min(self.n_owned, n)
        while at < n and self.tokens[at] == tokens[at]:
            at += 1
        del self.tokens[at:]
        self.n_owned = len(tokens)


class DraftModel:
    name = "model"
    priors: tuple[float, ...] = (0.8,)
    reach = 0

    def __init__(self, model: Model, target: Tokenizer) -> None:
        """Raises RequestError where the vocabularies differ."""
        check_vocabularies(model.tokenizer, target)
        if model.executor.n_states:
            raise UnsupportedError(
                f"{model.config.name}: a model with recurrent layers cannot guess, its states "
                "would have to be taken back"
            )
        if not model.config.generates:
            raise UnsupportedError(f"{model.config.name}: this model does not generate")
        self._model, self._executor = model, model.executor
        self._words = model.words
        both = min(model.tokenizer.vocab_size, target.vocab_size)
        self._n_words = both if self._words is None else int(np.searchsorted(self._words, both))
        self._blocks = OwnBlocks(self._executor)
        self._reads: dict[str, _Read] = {}
        self._costs = StepCosts.measure(self._executor)

    def token_seconds(self, n_requests: int) -> float:
        return self._costs.of(n_requests)

    def see(self, request: Request, first: int, hidden: Hidden) -> None: ...

    def forget(self, request: Request) -> None:
        if read := self._reads.pop(request.id, None):
            self._blocks.give_back(read.blocks)

    def close(self) -> None:
        self._model.close()

    def propose(self, requests: Sequence[Request], most: int) -> list[Draft]:
        drafts: dict[str, list[Guess]] = {}
        most_requests = self._executor.max_rows // FEW_ROWS
        able = [r for r in requests if self._knows(r) and self._has_room(r, most)][:most_requests]
        waiting: dict[str, list[int]] = {}
        for request in able:
            read, tokens = self._reads[request.id], request.tokens
            read.keep_common(tokens)
            while (n_left := len(tokens) - len(read.tokens)) > FEW_ROWS:
                at, n = len(read.tokens), min(n_left - 1, self._executor.max_rows)
                self._run([read], [tokens[at : at + n].tolist()], wants=False)
            waiting[request.id] = tokens[len(read.tokens) :].tolist()
            drafts[request.id] = []
        reads = [self._reads[request.id] for request in able]
        for _ in range(most if able else 0):
            logits = self._run(reads, list(waiting.values()), wants=True)
            for request, row in zip(able, logits[:, : self._n_words], strict=True):
                guess = guess_of(request, row, len(drafts[request.id]), self._words)
                drafts[request.id].append(guess)
                waiting[request.id] = [guess.token]
        return [draft_of(drafts.get(request.id, ())) for request in requests]

    def _knows(self, request: Request) -> bool:
        """The larger vocabulary may have tokens that the small model has no row for."""
        read = self._reads.setdefault(request.id, _Read())
        new = request.tokens[read.n_owned :]
        return bool(new.max(initial=0) < self._model.tokenizer.vocab_size)

    def _has_room(self, request: Request, most: int) -> bool:
        """Takes blocks for what the request owns and the guesses behind it."""
        read, n_tokens = self._reads[request.id], request.n_tokens + most
        if n_tokens > self._model.context or not self._blocks.grow(read.blocks, n_tokens):
            self.forget(request)  # its blocks are for others; it begins anew when there is room
            return False
        return True

    def _run(
        self, reads: Sequence[_Read], rows: Sequence[list[int]], *, wants: bool
    ) -> npt.NDArray[np.float32]:
        """Computes these rows behind what was read; wants: the logits of each one's last row."""
        sequences = [
            Rows(read.blocks, len(read.tokens), tokens)
            for read, tokens in zip(reads, rows, strict=True)
        ]
        logits = self._executor.run(step_of(sequences, wants=wants))
        for read, tokens in zip(reads, rows, strict=True):
            read.tokens += tokens
        return logits


def draft_of(guesses: Sequence[Guess]) -> Draft:
    made = [guess.token for guess in guesses], 0, [guess.chances for guess in guesses]
    return Draft(*made) if guesses else NO_DRAFT


def check_vocabularies(small: Tokenizer, large: Tokenizer) -> None:
    """Raises RequestError unless the tokens of both mean the same."""
    n = min(small.vocab_size, large.vocab_size)
    extra = max(small.vocab_size, large.vocab_size) - n
    if extra > _MOST_EXTRA:
        raise RequestError(
            f"the draft model has {small.vocab_size} tokens, the model {large.vocab_size}: they "
            "are not of one vocabulary",
            field="draft",
        )
    for token in range(min(_FIRST_WORD, n), n):
        if small.token_text(token) != large.token_text(token):
            raise RequestError(
                f"token {token} is {small.token_text(token)!r} in the draft model and "
                f"{large.token_text(token)!r} in the model: they are not of one vocabulary",
                field="draft",
            )
