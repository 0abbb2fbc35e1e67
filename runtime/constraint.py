"""What may limit the tokens of one answer: the interface between engine and grammars.

Owns: Constraint. Must not know: grammars, their library, who asked for one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Allowed = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """Follows one request's output in order. Only tokens that were drawn are fed to it, so a
    preemption, which recomputes rows and draws nothing anew, leaves it as it is."""

    def allowed(self) -> Allowed:
        """(vocab_size,) True where the next token may be. Raises ModelError when it cannot tell:
        a request then ends with an error, never with free text."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was drawn."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing may follow but an end: the answer is complete."""
        ...
