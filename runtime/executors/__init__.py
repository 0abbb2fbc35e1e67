"""What an executor is, and the choice of one by name.

Executors run a Plan. They never import models, scheduler or engine.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..step import Step


class Executor(Protocol):
    """Runs steps of one plan and owns the KV pool (`n_blocks` blocks of `block_tokens` tokens)."""

    name: str
    max_rows: int
    block_tokens: int
    n_blocks: int

    def run(self, step: Step) -> np.ndarray:
        """Writes the step's keys and values; returns logits (n_out, vocab_size) float32."""
        ...

    def copy_block(self, src: int, dst: int) -> None:
        """Copies the keys and values of one block in every layer."""
        ...

    def close(self) -> None: ...
