"""A server over a real engine whose model writes no sense: only a grammar makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
from martlet.runtime.engine import Engine

from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import THINKING, VOCAB_SIZE, byte_tokenizer
from .serving import serving_engine


def babble(history: np.ndarray) -> np.ndarray:
    """Logits from noise: a model that writes no sense at all, letters more often than others."""
    noise = np.random.default_rng(history.tolist()).standard_normal(VOCAB_SIZE)
    noise[32:127] += 4
    return noise.astype(np.float32)


@contextlib.contextmanager
def babbling(template: str | None = THINKING, **options: Any) -> Iterator[httpx.Client]:
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(template)
    engine = Engine(ScriptedExecutor(babble, n_blocks=512), tokenizer, context=2048, **options)
    with serving_engine(engine, tokenizer, timeout_s=60) as client:
        yield client
