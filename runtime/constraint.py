"""What may limit the tokens of one answer: the interface between engine and grammars.

Owns: Constraint, and how allowed tokens are written. Must not know: grammars, their library, who
asked for one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Allowed = npt.NDArray[np.uint32]
"""(ceil(vocab_size / 32)) bit i % 32 of word i // 32 is set where the next token may be i. Bits
beyond the vocabulary mean nothing."""

WORD_BITS = 32


def is_allowed(allowed: Allowed, token_id: int) -> bool:
    return bool(int(allowed[token_id // WORD_BITS]) >> token_id % WORD_BITS & 1)


def flags_of(allowed: Allowed, vocab_size: int) -> npt.NDArray[np.bool_]:
    """(vocab_size,) True where the next token may be."""
    raw = allowed.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(raw, count=vocab_size, bitorder="little").view(np.bool_)


def allowed_of(flags: npt.NDArray[np.bool_]) -> Allowed:
    """The inverse of flags_of."""
    raw = np.packbits(flags, bitorder="little")
    return np.pad(raw, (0, -len(raw) % 4)).view("<u4").astype(np.uint32, copy=False)


class Constraint(Protocol):
    """Follows one request's output in order. Only tokens that were drawn are fed to it, so a
    preemption, which recomputes rows and draws nothing anew, leaves it as it is."""

    def allowed(self) -> Allowed:
        """Which tokens may be next; kept until the next call. Raises ModelError when it cannot
        tell: a request then ends with an error, never with free text."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was drawn."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing may follow but an end: the answer is complete."""
        ...
