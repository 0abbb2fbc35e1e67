"""States of recurrent layers behind rows that were taken back: those of a text without guesses."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.executors.numba_executor import NumbaExecutor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.sampling import SamplingParams

from ..recorded import recorded_model
from .guessing import always
from .harness import Answer, run_all
from .native_library import LIBRARY  # skips the file where there is no native library
from .scripted import ScriptedTokenizer
from .tiny import Chunk, TinyModel, make_step, run_tokens

ARCHITECTURES = ("lfm2", "qwen35", "granitehybrid", "falcon-h1", "nemotron_h")
EXECUTORS = {"native": NativeExecutor, "reference": ReferenceExecutor, "numba": NumbaExecutor}
N_TOKENS, BLOCK, N_GUESSES = 60, 16, 5


@cache
def model_of(arch: str) -> TinyModel:
    return TinyModel(*recorded_model(arch, "Q8_0"))


def executor_of(arch: str, name: str, n_blocks: int = 16) -> Any:
    model = model_of(arch)
    sizes = {"block_tokens": BLOCK, "n_blocks": n_blocks, "n_states": 9, "n_guesses": N_GUESSES}
    return EXECUTORS[name](model.plan(32), model.weights, **sizes)


class Guessing:
    """One text, computed with guesses of which some are wrong; the logits of its own rows."""

    def __init__(self, tokens: list[int], blocks: range, slot: int, rng: random.Random) -> None:
        self.tokens, self.blocks, self.slot, self.rng = tokens, blocks, slot, rng
        self.at = self.n_replays = 0
        self.logits: list[np.ndarray] = []

    def chunk(self, vocab_size: int) -> tuple[Chunk, int]:
        left = len(self.tokens) - self.at
        n_kept = self.rng.choice([1, 1, 1, 6]) if self.at else self.rng.randint(1, 12)
        n_kept = min(n_kept, left)
        n_guesses = min(self.rng.randint(0, N_GUESSES), left - n_kept)
        self.n_right = self.rng.randint(0, n_guesses)
        self.n_kept = n_kept
        rows = self.tokens[self.at : self.at + n_kept + n_guesses]
        for i in range(n_kept + self.n_right, len(rows)):
            rows[i] = (rows[i] + 1 + self.rng.randrange(vocab_size - 1)) % vocab_size
        return Chunk(rows, self.at, self.blocks), n_guesses

    def take(self, logits: np.ndarray) -> None:
        n = self.n_kept + self.n_right
        self.logits += list(logits[:n])
        self.at, self.n_replays = self.at + n, self.n_right


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *((arch, name) for arch in ARCHITECTURES for name in ("native", "reference")),
        *((arch, "numba") for arch in ARCHITECTURES[:3]),  # one for each op with a state
    ],
)
def test_guesses_taken_back_leave_no_trace(arch: str, name: str) -> None:
    """Two texts side by side, bit for bit as alone, row by row, without guesses."""
    assert LIBRARY
    vocab_size = model_of(arch).config.vocab_size
    rng = random.Random(7)
    texts = [[rng.randrange(vocab_size) for _ in range(N_TOKENS)] for _ in range(2)]
    executor = executor_of(arch, name)
    expected = [run_tokens(executor, tokens, chunk=7) for tokens in texts]
    n_rounds = 1 if name == "reference" else 3
    for _ in range(n_rounds):
        guessing = [
            Guessing(tokens, range(4 * i, 4 * i + 4), 2 - i, rng) for i, tokens in enumerate(texts)
        ]
        while running := [text for text in guessing if text.at < N_TOKENS]:
            chunks, guesses = zip(*(text.chunk(vocab_size) for text in running), strict=True)
            step = replace(
                make_step(chunks),
                states=np.array([text.slot for text in running], np.int32),
                guesses=np.array(guesses, np.int32),
                replays=np.array([text.n_replays for text in running], np.int32),
            )
            logits = executor.run(step)
            for text, start in zip(running, step.seq_start, strict=False):
                text.take(logits[start:])
        for text, logits in zip(guessing, expected, strict=True):
            assert np.array_equal(np.array(text.logits), logits)
    executor.close()


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_texts_are_those_without_guesses(arch: str, name: str) -> None:
    """Greedy and drawn, side by side in a pool that makes them preempt each other; twice, the
    second time from snapshots of the first."""
    prompts = [[3 + (7 * i + j) % 50 for j in range(17 + i)] for i in range(3)]
    said: list[list[list[int]]] = []
    for n_guesses in (0, N_GUESSES):
        speculation = None
        if n_guesses:
            outputs = {str(i): ids for i, ids in enumerate(said[0])}
            speculation = always(n_guesses, outputs, 0.7)
        executor = executor_of(arch, name, n_blocks=9)
        tokenizer = ScriptedTokenizer(eog_ids=())
        engine = Engine(executor, tokenizer, context=90, state_every=BLOCK, speculation=speculation)
        for life in range(2 if n_guesses else 1):
            answers = [Answer() for _ in prompts]
            for i, (prompt, heat) in enumerate(zip(prompts, (0.0, 0.7, 1.3), strict=True)):
                params = SamplingParams(temperature=heat, seed=i, max_tokens=40)
                engine.submit(prompt, params, answers[i], request_id=str(i))
            run_all(engine)
            said.append([answer.ids for answer in answers])
            assert said[-1] == said[0]
            assert not life or any(answer.finish.n_cached for answer in answers)
        if speculation:
            assert 0 < speculation.counts.accepted < speculation.counts.drafted
            assert engine.stats().preemptions
        engine.close()
        executor.close()
