"""Which tokens are guessed, where an output matrix of the whole vocabulary takes too long.

Owns: the choice of the most frequent tokens, the guess among them. Must not know: models, how
guesses are checked.

A guess is drawn from, or the likeliest of, those that the rows of a smaller matrix stand for; the
others are never guessed, and so have no chance in the distribution that the rule of rejection.py is
told. Neither rule asks more of a guess (EAGLE-3 does so: Li et al., 2025, arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import RequestError
from .rejection import Distribution, Guess, certain
from .request import Request
from .sampling import Logits, Use, kept_weights, keyed_uniform
from .vocabulary import Vocabulary, WritableVocabulary

Words = npt.NDArray[np.int64]
"""(n_words) token ids, ascending: what entry i of a drafter's logits stands for."""

ChoiceOfWords: TypeAlias = Callable[[WritableVocabulary], Words]


def frequent_words(vocabulary: Vocabulary, n: int, text: Sequence[int] = ()) -> Words:
    """The n tokens that occur most often in a text of token ids. Of those that occur equally often,
    the lower ids: vocabularies that are made by merging have frequent tokens first. Tokens that end
    an answer are always among them. Raises RequestError."""
    ends = sorted(vocabulary.eog_ids)
    if not len(ends) < n <= vocabulary.vocab_size:
        raise RequestError(
            f"{n} tokens are to be guessed, expected {len(ends) + 1} to {vocabulary.vocab_size}: "
            f"{len(ends)} end an answer, and the vocabulary has no more",
            field="draft_vocab",
        )
    counts = np.bincount(np.asarray(text, np.int64), minlength=vocabulary.vocab_size)
    by_count = np.argsort(-counts, kind="stable")
    others = by_count[~np.isin(by_count, ends)]
    return np.sort(np.concatenate((np.array(ends, np.int64), others[: n - len(ends)])))


def guess_of(request: Request, logits: Logits, n_before: int, words: Words | None) -> Guess:
    """The request's token behind so many guesses, by what a small model says: logits (n_words,).
    words: what they stand for; None: the vocabulary's first ones."""
    best = int(logits.argmax())
    if not request.rejects or request.params.is_greedy:
        token = best if words is None else int(words[best])
        return Guess(token, certain(token))
    weights, places = kept_weights(logits, best, request.params)
    ids = places if words is None else words if places is None else words[places]
    chances = Distribution(ids, weights)
    place = request.n_output + n_before
    return Guess(chances.draw(keyed_uniform(request.seed, place, Use.GUESS)), chances)
