"""What an executor is, and the choice of one by name.

Executors run a Plan. They never import models, scheduler or engine.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..step import Step


class Executor(Protocol):
    """Runs steps of one plan and owns the KV pool (`n_blocks` blocks of `block_tokens` tokens).

    Layers with a window keep theirs in `n_window_blocks` blocks of their own, and see `window`
    positions at most (0: no layer has one). Recurrent layers keep the state of a sequence in one
    of `n_states` slots (0: no layer is recurrent), and beside it what they need to take back up to
    `n_guesses` rows of a step. Where rows see those after them, a step must
    have all rows of a sequence (`sees_ahead`), and its logits are none.
    """

    name: str
    max_rows: int
    block_tokens: int
    n_blocks: int
    n_window_blocks: int
    window: int
    n_states: int
    n_guesses: int
    sees_ahead: bool
    hidden: np.ndarray
    """(n_hidden, width) float32: hidden states that the last step asked for."""

    def run(self, step: Step) -> np.ndarray:
        """Writes the step's keys and values; returns logits (n_out, vocab_size) float32."""
        ...

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        """Copies the keys and values of one block in every layer; window: from where to where in
        windowed layers, if not from src to dst."""
        ...

    def copy_state(self, src: int, dst: int) -> None:
        """Copies the state of one sequence in every recurrent layer, from slot to slot."""
        ...

    def close(self) -> None: ...
