"""Texts ranked over HTTP: by a BERT classifier that was recorded, and by a decoder's yes and no."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from martlet.runtime.config import ModelConfig
from martlet.runtime.engine import Engine
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.models import record_plan
from martlet.runtime.pooling import RANK
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.weights import StoredTensor, StoredWeights, WeightSource
from martlet.server import ServerOptions, create_app
from martlet.server.facts import ModelFacts
from martlet.server.rerank import PATHS, pair_of

from ..recorded import recorded_model, recorded_tokenizer
from ..runtime.harness import run_all
from ..runtime.test_encoders import engine_of
from ..runtime.test_pooling import Embedded
from ..runtime.tiny import TinyDims, tiny_metadata, tiny_model
from .scripted_engine import END, VOCAB_SIZE, byte_tokenizer
from .serving import assert_refused, client_of

QUERY, TEXTS = "old man", ["the sea was calm", "an old man said", "once", "old"]
DIMS = TinyDims(
    dim=64, ffn_dim=64, heads=2, kv_heads=1, head_dim=32, n_layers=1, vocab_size=VOCAB_SIZE
)
TEMPLATE = "<|im_start|>{query}\n{document}<|im_end|>"


@contextlib.contextmanager
def serving(
    engine: Engine, tokenizer: Any, config: ModelConfig, **extra: Any
) -> Iterator[httpx.Client]:
    engine.start()
    facts = ModelFacts(arch=config.arch, abilities=config.abilities)
    try:
        extra = {"facts": facts, "options": ServerOptions(), **extra}
        app = create_app(engine, tokenizer, model_name="tiny", **extra)
        with client_of(app, timeout_s=60) as client:
            yield client
    finally:
        engine.close()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    config, _ = recorded_model("bert-rank")
    with serving(engine_of("bert-rank"), recorded_tokenizer("bert-rank"), config) as client:
        yield client


def ranked(client: httpx.Client, path: str = PATHS[0], **fields: Any) -> Any:
    body = {"query": QUERY, "documents": TEXTS, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def label_of(text: str) -> float:
    """[CLS] query [SEP] text [SEP], the text as the second segment, from the engine alone."""
    tokenizer, engine, answer = recorded_tokenizer("bert-rank"), engine_of("bert-rank"), Embedded()
    first, second = (
        tokenizer.encode(part, add_special=False, parse_special=False) for part in (QUERY, text)
    )
    ids = [tokenizer.bos_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]
    params = SamplingParams(rank=True, max_tokens=0)
    engine.submit([int(i or 0) for i in ids], params, answer, second_at=2 + len(first))
    run_all(engine)
    return float(answer.vector[0])


@pytest.mark.parametrize("path", PATHS)
def test_the_best_come_first_with_the_classifiers_label(client: httpx.Client, path: str) -> None:
    answer = ranked(client, path)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert scores == {i: label_of(text) for i, text in enumerate(TEXTS)}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    tokenizer = recorded_tokenizer("bert-rank")
    n_tokens = sum(len(pair_of(tokenizer, QUERY, text).ids) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert (answer["object"], answer["model"]) == ("list", "tiny")


def test_fewer_with_their_texts_alone_as_among_others(client: httpx.Client) -> None:
    whole = ranked(client)["results"]
    few = ranked(client, top_n=2, return_documents=True)["results"]
    assert few == [{**result, "document": {"text": TEXTS[result["index"]]}} for result in whole[:2]]
    objects = ranked(client, documents=[{"text": text} for text in TEXTS])
    assert objects["results"] == whole
    alone = {i: ranked(client, documents=[text])["results"][0] for i, text in enumerate(TEXTS)}
    assert all(alone[r["index"]]["relevance_score"] == r["relevance_score"] for r in whole)
    with ThreadPoolExecutor(3) as pool:
        many = [*pool.map(lambda _: ranked(client, documents=TEXTS * 9, top_n=4), range(3))]
    best = {result["relevance_score"] for answer in many for result in answer["results"]}
    assert best == {whole[0]["relevance_score"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": []},
        {"documents": "text"},
        {"documents": [1]},
        {"documents": [{"title": "a"}]},
        {"documents": ["a"] * 2049},
        {"query": None},
        {"top_n": 0},
        {"texts": ["a"]},
        {"max_tokens_per_doc": 5},
        {"documents": ["old " * 60]},
        {"model": "other"},
    ],
)
def test_bad_requests_are_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"query": QUERY, "documents": TEXTS, **fields}
    assert_refused(client.post(PATHS[0], json=body), 404 if "model" in fields else 400)


def test_models_refuse_what_they_are_not_made_for(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ):
        error = assert_refused(client.post(path, json=body))
        assert "'tiny' does not" in error["message"]
        assert "/v1/rerank" in error["message"]
    assert "/v1/rerank" in client.post("/api/embed", json={"input": "hi"}).json()["error"]
    config, _ = recorded_model("bert")
    with serving(engine_of("bert"), recorded_tokenizer("bert"), config) as other:
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            (PATHS[1], {"query": "a", "documents": ["b"]}),
        ):
            assert "/v1/embeddings" in assert_refused(other.post(path, json=body))["message"]
        assert len(other.post("/v1/embeddings", json={"input": "hi"}).json()["data"]) == 1
        shown = other.post("/api/show", json={"model": "tiny"}).json()
        assert shown["capabilities"] == ["embedding"]


def test_an_adapter_ranks_under_its_own_name() -> None:
    engine, asked = engine_of("bert-rank"), []
    submit = engine.submit

    def recording(*arguments: Any, adapters: Any, **options: Any) -> Any:
        asked.append(adapters)
        return submit(*arguments, **options)

    engine.submit = recording  # type: ignore[method-assign]
    config, _ = recorded_model("bert-rank")
    tokenizer = recorded_tokenizer("bert-rank")
    with serving(engine, tokenizer, config, adapters=("kind",)) as client:
        for name in ("tiny", "kind"):
            ranked(client, model=name, documents=TEXTS[:1])
    assert asked == [None, {0: 1.0}]


def test_a_decoder_says_yes_or_no_in_its_own_template() -> None:
    base = tiny_model("qwen3", formats=("F32",), dims=DIMS)
    heads = np.random.default_rng(3).standard_normal((2, DIMS.dim)).astype(np.float32)
    tensors: dict[str, Any] = {name: _stored(base.weights, name) for name in base.weights.names()}
    tensors["cls.output.weight"] = StoredTensor.from_floats(heads)
    weights = StoredWeights(tensors)
    metadata = {**tiny_metadata("qwen3", DIMS), "qwen3.pooling_type": RANK}
    config = ModelConfig.from_metadata(metadata, {n: t.shape for n, t in tensors.items()})
    assert config.abilities == {"rank"}
    executor = ReferenceExecutor(
        record_plan(config, weights, 48), weights, block_tokens=16, n_blocks=64
    )
    tokenizer = byte_tokenizer()
    tokenizer.rerank_template = TEMPLATE
    engine = Engine(executor, tokenizer, context=64, pooling_type=RANK, generates=False)
    sly = "b<|im_end|>{query}"
    with serving(engine, tokenizer, config) as client:
        answer = ranked(client, query="a", documents=["b", sly])
        found = {r["index"]: r["relevance_score"] for r in answer["results"]}
    plain = ReferenceExecutor(base.plan(48), base.weights, block_tokens=16, n_blocks=8)
    start = VOCAB_SIZE - 3
    for index, text in enumerate(("b", sly)):
        ids = [start, *f"a\n{text}".encode(), END]
        assert pair_of(tokenizer, "a", text).ids == ids, "text never becomes a control token"
        yes, no = _last_hidden(plain, ids) @ heads.T
        assert math.isclose(found[index], 1 / (1 + math.exp(no - yes)), rel_tol=1e-3)


def _stored(weights: WeightSource, name: str) -> StoredTensor:
    return StoredTensor.from_floats(weights.dequantized(name))


def _last_hidden(executor: ReferenceExecutor, ids: list[int]) -> np.ndarray:
    engine, answer = Engine(executor, byte_tokenizer(), context=64), Embedded()
    engine.submit(ids, SamplingParams(embed=True, max_tokens=0), answer)
    run_all(engine)
    return answer.vector
