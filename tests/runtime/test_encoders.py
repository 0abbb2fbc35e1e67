"""Encoders: what `transformers` computes, in any company, and what an engine does with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.engine import Engine
from martlet.runtime.errors import ContextTooLong, ModelError, RequestError, UnsupportedError
from martlet.runtime.executors import Executor
from martlet.runtime.executors.choice import create_executor
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.ops import KvType
from martlet.runtime.pooling import MEAN, RANK
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.weights import StoredWeights

from ..recorded import (
    ENCODERS,
    LOGITS,
    RECORDED,
    RELATIVE_ERROR,
    convert,
    error_of,
    recorded_ids,
    recorded_model,
    recorded_tokenizer,
    relative_error,
)
from .harness import run_all
from .test_oracle import executor as executor
from .test_pooling import Embedded
from .tiny import Chunk, make_step

N_FIRST = 9  # tokens of the first of two texts, as the recordings have it
CONTEXT = 40


def runner_of(name: str, executor: str, max_rows: int = 64) -> Executor:
    config, weights = recorded_model(name)
    plan = record_plan(config.at_context(max_rows), weights, max_rows=max_rows)
    options = {"n_blocks": 12, "block_tokens": 16, "kv_type": KvType.F32}
    return create_executor(executor, plan, weights, **options)[0]


def hidden_of(runner: Executor, chunks: Sequence[Chunk], at: int, n: int) -> np.ndarray:
    """Of n rows from row `at` on; the chunks are of two texts each."""
    step = make_step(chunks, out_rows=[])
    segments = [int(i >= N_FIRST) for chunk in chunks for i in range(len(chunk.tokens))]
    rows = np.arange(at, at + n, dtype=np.int32)
    runner.run(replace(step, hidden_rows=rows, segments=np.array(segments, np.int32)))
    return runner.hidden.copy()


@pytest.mark.parametrize("name", ENCODERS)
def test_every_executor_equals_transformers_in_any_company(name: str, executor: str) -> None:
    ids, runner = recorded_ids(name), runner_of(name, executor)
    is_ranking = recorded_model(name)[0].n_labels > 0
    n = 1 if is_ranking else len(ids)
    try:
        if is_ranking:
            alone = hidden_of(runner, [Chunk(ids, 0, [0, 1])], 0, n)
        else:  # all of one segment
            step = make_step([Chunk(ids, 0, [0, 1])], out_rows=[])
            runner.run(replace(step, hidden_rows=np.arange(n, dtype=np.int32)))
            alone = runner.hidden.copy()
        assert error_of(name, alone) < RELATIVE_ERROR
        first = hidden_of(runner, [Chunk(ids, 0, [0, 1])], 0, n)
        others = [Chunk(ids[:5], 0, [7]), Chunk(ids[3:], 0, [2, 9])]
        among = hidden_of(runner, [others[0], Chunk(ids, 0, [5, 3]), others[1]], 5, n)
        np.testing.assert_array_equal(among, first)
    finally:
        runner.close()


def engine_of(name: str, **options: object) -> Engine:
    config, weights = recorded_model(name)
    plan = record_plan(config.at_context(CONTEXT), weights, max_rows=CONTEXT)
    executor = ReferenceExecutor(plan, weights, block_tokens=16, n_blocks=9, kv_type=KvType.F32)
    settings = {
        "context": CONTEXT,
        "pooling_type": config.pooling_type,
        "generates": config.generates,
    }
    return Engine(executor, recorded_tokenizer(name), **{**settings, **options})  # type: ignore[arg-type]


def embed(engine: Engine, prompt: Sequence[int], **rank: object) -> Embedded:
    answer = Embedded()
    params = SamplingParams(embed=not rank, rank=bool(rank), max_tokens=0)
    engine.submit(prompt, params, answer, **rank)  # type: ignore[arg-type]
    return answer


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "gemma-embedding"])
def test_b78_texts_are_pooled_as_the_checkpoint_says_alone_as_among_others(name: str) -> None:
    ids, (config, _) = recorded_ids(name), recorded_model(name)
    alone = engine_of(name)
    answer = embed(alone, ids)
    run_all(alone)
    rows = hidden_of(runner_of(name, "reference"), [Chunk(ids[:N_FIRST], 0, [0, 1])], 0, N_FIRST)
    short = embed(alone, ids[:N_FIRST])
    run_all(alone)
    expected = rows.mean(axis=0, dtype=np.float64) if config.pooling_type == MEAN else rows[0]
    assert np.abs(short.vector - expected).max() < 1e-6
    engine = engine_of(name)
    answers = [embed(engine, ids[: 3 + 5 * i]) for i in range(4)]
    again = [embed(engine, ids) for _ in range(5)]
    steps = 0
    while engine.step():
        engine.scheduler.check()
        steps += 1
    assert steps > 2, "a step has room for one long text"
    assert all((a.vector == answer.vector).all() for a in again)
    assert len({a.vector.tobytes() for a in answers}) == 4
    assert engine.stats().tokens_cached == 0
    assert engine.stats().tokens_recomputed == 0
    assert engine.scheduler.pool.n_held == engine.scheduler.pool.n_cached == 0


def test_two_texts_are_ranked_by_what_transformers_says() -> None:
    ids = recorded_ids("bert-rank")
    engine = engine_of("bert-rank")
    one, other = embed(engine, ids, second_at=N_FIRST), embed(engine, ids, second_at=2)
    run_all(engine)
    assert error_of("bert-rank", one.vector[None]) < RELATIVE_ERROR
    assert (one.vector != other.vector).all(), "where the second text begins counts"


def test_a_decoder_that_ranks_has_the_rows_of_yes_and_no(tmp_path: Path) -> None:
    """As sentence-transformers describes Qwen3's rerankers: two of the logits are the labels."""
    yes, no, folder = 7, 11, tmp_path / "ranks"
    shutil.copytree(RECORDED / "qwen3", folder)
    (folder / "1_LogitScore").mkdir()
    score = {"true_token_id": yes, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    file = GGUFFile.open(convert(folder, tmp_path / "ranks.gguf"))
    weights = StoredWeights(file.tensors)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes)
    assert config.abilities == {"rank"}
    assert "{document}" in file.metadata["tokenizer.chat_template.rerank"]
    runner = ReferenceExecutor(
        record_plan(config, weights, 64), weights, block_tokens=16, n_blocks=4, kv_type=KvType.F32
    )
    ids = recorded_ids("qwen3")
    step = make_step([Chunk(ids, 0, [0, 1])], out_rows=[])
    runner.run(replace(step, hidden_rows=np.arange(len(ids), dtype=np.int32)))
    with np.load(LOGITS / "qwen3.npz") as recorded:
        expected = recorded["logits"][:, [yes, no]]
    assert relative_error(runner.hidden, expected) < RELATIVE_ERROR


def test_what_they_cannot_do_is_refused() -> None:
    engine = engine_of("bert")
    with pytest.raises(RequestError, match="does not generate"):
        engine.submit([1], SamplingParams(), Embedded())
    with pytest.raises(RequestError, match="does not generate"):
        engine.submit([1], SamplingParams(prompt_logprobs=0, max_tokens=0), Embedded())
    with pytest.raises(RequestError, match=f"only models of type {RANK} rank"):
        embed(engine, [1, 2], second_at=1)
    with pytest.raises(RequestError, match="ranks texts"):
        embed(engine_of("bert-rank"), [1])
    with pytest.raises(ContextTooLong, match=r"41 tokens.* 40 rows"):
        embed(engine_of("bert", context=64), [1] * (CONTEXT + 1))


def test_steps_for_logits_that_do_not_exist_are_refused() -> None:
    runner = runner_of("bert", "native")
    with pytest.raises(ModelError, match=r"1 rows of logits .* has none"):
        runner.run(make_step([Chunk([1, 2], 0, [0])], out_rows=[1]))
    long = Chunk(list(range(30)) * 3, 0, range(6))
    with pytest.raises(ModelError, match="at most 64"):
        runner.run(make_step([long], out_rows=[]))
    step = make_step([Chunk([1, 2], 0, [0])], out_rows=[])
    with pytest.raises(ModelError, match=r"segment 2 of row 1 .* 2 segments"):
        runner.run(replace(step, segments=np.array([0, 2], np.int32)))
    with pytest.raises(ModelError, match=r"position 64 .* 64 positions"):
        runner.run(make_step([Chunk([1], 64, range(6))], out_rows=[]))
    runner.close()


def test_prefixes_are_not_kept_on_disk() -> None:
    with pytest.raises(UnsupportedError, match="see those after"):
        engine_of("bert", prefix_store=object())
