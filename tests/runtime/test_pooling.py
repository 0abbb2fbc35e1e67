"""Prompts as vectors: the stated pooling of the hidden states, whoever shares the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from martlet.runtime.config import ModelConfig
from martlet.runtime.engine import Engine
from martlet.runtime.errors import FileFormatError, RequestError
from martlet.runtime.events import Event, PromptEvent
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.sampling import SamplingParams

from .harness import Answer, ask, run_all
from .scripted import ScriptedTokenizer
from .tiny import Chunk, TinyDims, make_step, tiny_metadata, tiny_model

DIMS = TinyDims(dim=64, ffn_dim=64, heads=2, kv_heads=1, head_dim=32, n_layers=1, vocab_size=260)
MODEL = tiny_model("llama", formats=("Q8_0",), dims=DIMS)
PROMPT = [(7 * i) % 250 for i in range(45)]
MEAN, CLS, LAST = 1, 2, 3


class Embedded(Answer):
    prompt: PromptEvent | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, PromptEvent):
            assert self.prompt is None
            self.prompt = event
        else:
            super().__call__(event)

    @property
    def vector(self) -> np.ndarray:
        assert self.prompt is not None
        assert self.prompt.embedding is not None
        return self.prompt.embedding


def engine_of(
    pooling_type: int = LAST, *, n_blocks: int = 40, context: int = 128, **options: Any
) -> Engine:
    executor = ReferenceExecutor(MODEL.plan(64), MODEL.weights, block_tokens=16, n_blocks=n_blocks)
    tokenizer = ScriptedTokenizer(eog_ids=())
    return Engine(executor, tokenizer, context=context, pooling_type=pooling_type, **options)


def embed(engine: Engine, prompt: Sequence[int] = PROMPT) -> Embedded:
    answer = Embedded()
    engine.submit(prompt, SamplingParams(embed=True, max_tokens=0), answer)
    return answer


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    executor = ReferenceExecutor(MODEL.plan(64), MODEL.weights, block_tokens=16, n_blocks=4)
    step = make_step([Chunk(PROMPT, 0, [0, 1, 2])], out_rows=[])
    executor.run(replace(step, hidden_rows=np.arange(45, dtype=np.int32)))
    return executor.hidden


def expected(hidden: np.ndarray, pooling_type: int) -> np.ndarray:
    if pooling_type == MEAN:
        return hidden.mean(axis=0, dtype=np.float64).astype(np.float32)
    return hidden[0] if pooling_type == CLS else hidden[-1]


@pytest.mark.parametrize("pooling_type", [0, MEAN, CLS, LAST])
@pytest.mark.parametrize("step_rows", [3, 64])
def test_b78_pooling_is_as_declared_in_any_company(
    hidden: np.ndarray, pooling_type: int, step_rows: int
) -> None:
    engine = engine_of(pooling_type, step_rows=step_rows)
    stream = ask(engine, [5] * 10, max_tokens=30, ignore_eos=True)
    answers = [embed(engine) for _ in range(2)]
    others = [embed(engine, [i, 9, 9]) for i in range(3)]
    run_all(engine)
    wanted = expected(hidden, pooling_type)
    assert all(answer.vector.tobytes() == wanted.tobytes() for answer in answers)
    assert (others[0].vector != others[1].vector).any()
    assert stream.finish.n_output == 30
    finish = answers[0].finish
    assert (finish.reason, finish.n_output, finish.n_prompt) == ("length", 0, 45)


@pytest.mark.parametrize(("pooling_type", "n_cached"), [(MEAN, 0), (CLS, 0), (LAST, 32)])
def test_a_known_prefix_is_taken_where_only_the_last_row_counts(
    hidden: np.ndarray, pooling_type: int, n_cached: int
) -> None:
    engine = engine_of(pooling_type)
    ask(engine, PROMPT, max_tokens=1)
    run_all(engine)
    answer = embed(engine)
    run_all(engine)
    assert answer.finish.n_cached == n_cached
    assert answer.vector.tobytes() == expected(hidden, pooling_type).tobytes()


@pytest.mark.parametrize("pooling_type", [MEAN, CLS, LAST])
def test_preemption_counts_no_row_twice(hidden: np.ndarray, pooling_type: int) -> None:
    engine = engine_of(pooling_type, step_rows=16, prefix_reuse=False)
    answer = embed(engine)
    engine.step()
    engine.step()
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    run_all(engine)
    assert answer.finish.trace.n_recomputed == 32
    assert answer.vector.tobytes() == expected(hidden, pooling_type).tobytes()


def test_scored_and_embedded_prompts_share_steps_with_streams(hidden: np.ndarray) -> None:
    """Logits and hidden states are told apart by request, also where their counts look alike."""
    alone = engine_of(MEAN)
    wanted = ask(alone, [8, 7], max_tokens=3)
    run_all(alone)
    engine = engine_of(MEAN)
    scored = Embedded()
    engine.submit([1, 2, 3], SamplingParams(prompt_logprobs=0, max_tokens=0), scored)
    embedded = embed(engine)
    stream = ask(engine, [8, 7], max_tokens=3)
    run_all(engine)
    assert embedded.vector.tobytes() == expected(hidden, MEAN).tobytes()
    assert stream.ids == wanted.ids
    assert scored.prompt is not None
    assert scored.prompt.logprobs is not None
    assert len(scored.prompt.logprobs) == 2


def test_a_whole_context_may_be_embedded() -> None:
    engine = engine_of(context=45, n_blocks=3)
    answer = embed(engine)
    run_all(engine)
    assert answer.vector.shape == (64,)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(RequestError, match="pooling type 4"):
        embed(engine_of(4))
    for params in ({"max_tokens": 1}, {}, {"max_tokens": 0, "prompt_logprobs": 1}):
        with pytest.raises(RequestError, match="max_tokens"):
            SamplingParams(embed=True, **params)


def test_the_file_says_how_it_pools() -> None:
    metadata = tiny_metadata("llama", DIMS)
    shapes = {"token_embd.weight": (DIMS.vocab_size, DIMS.dim)}
    assert ModelConfig.from_metadata(metadata, shapes).pooling_type == 0
    stated = {**metadata, "llama.pooling_type": 1}
    assert ModelConfig.from_metadata(stated, shapes).pooling_type == 1
    with pytest.raises(FileFormatError):
        ModelConfig.from_metadata({**metadata, "llama.pooling_type": -1}, shapes)
