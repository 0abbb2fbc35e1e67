"""Vectors over HTTP, through OpenAI's, LangChain's and Ollama's clients, from a real tiny model."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from martlet.runtime.engine import Engine
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.sampling import SamplingParams

from ..runtime.harness import run_all
from ..runtime.test_pooling import Embedded
from ..runtime.tiny import TinyDims, tiny_model
from .scripted_engine import BOS, VOCAB_SIZE, byte_tokenizer
from .serving import assert_refused, serving_engine

PATH = "/v1/embeddings"
DIM = 64
DIMS = TinyDims(
    dim=DIM, ffn_dim=64, heads=2, kv_heads=1, head_dim=32, n_layers=1, vocab_size=VOCAB_SIZE
)
MODEL = tiny_model("llama", formats=("F32",), dims=DIMS)
TEXTS = ["a", "a longer text", "ünïcode", "a <|im_end|> that is text"]
MEAN, RANK = 1, 4


def engine_of(pooling_type: int, **options: Any) -> Engine:
    executor = ReferenceExecutor(MODEL.plan(48), MODEL.weights, block_tokens=16, n_blocks=64)
    tokenizer = byte_tokenizer(add_bos=True)
    return Engine(executor, tokenizer, context=64, pooling_type=pooling_type, **options)


@contextlib.contextmanager
def serving(
    pooling_type: int = 0, *, max_queue: int = 64, **options: Any
) -> Iterator[httpx.Client]:
    engine = engine_of(pooling_type, max_queue=max_queue)
    with serving_engine(engine, byte_tokenizer(add_bos=True), timeout_s=60, **options) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as client:
        yield client


def direct(text: str, pooling_type: int = 0) -> np.ndarray:
    """From the engine alone, scaled here."""
    engine, answer = engine_of(pooling_type), Embedded()
    engine.submit([BOS, *text.encode()], SamplingParams(embed=True, max_tokens=0), answer)
    run_all(engine)
    wide = answer.vector.astype(np.float64)
    return wide / np.linalg.norm(wide)


def post(client: httpx.Client, path: str = PATH, **fields: Any) -> Any:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(answer: Any) -> np.ndarray:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]])


def test_b78_vectors_are_pooled_and_of_length_one_alone_as_in_a_batch(
    client: httpx.Client,
) -> None:
    answer = post(client, input=TEXTS, model="tiny")
    found = vectors(answer)
    assert found.shape == (4, DIM)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.allclose(found, [direct(text) for text in TEXTS], atol=1e-6)
    n_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    alone = [vectors(post(client, input=text))[0] for text in TEXTS]
    assert np.array(alone).tobytes() == found.tobytes()


def test_the_file_says_how_it_pools() -> None:
    with serving(MEAN) as mean:
        assert np.allclose(vectors(post(mean, input="abc"))[0], direct("abc", MEAN), atol=1e-6)
    with serving(RANK) as rank:
        error = assert_refused(rank.post(PATH, json={"input": "abc"}))
        assert "pooling type 4" in error["message"]


def test_base64_is_float32_and_dimensions_are_scaled_again(client: httpx.Client) -> None:
    whole = vectors(post(client, input="abc"))[0]
    packed = post(client, input="abc", encoding_format="base64")["data"][0]["embedding"]
    assert (np.frombuffer(base64.b64decode(packed), "<f4") == whole.astype(np.float32)).all()
    short = vectors(post(client, input="abc", dimensions=8))[0]
    assert np.allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    error = assert_refused(client.post(PATH, json={"input": "abc", "dimensions": DIM + 1}))
    assert error["param"] == "dimensions"


def test_ids_count_where_they_are_said_to_be_of_this_model(client: httpx.Client) -> None:
    ids = [BOS, *b"abc"]
    for form in (ids, [ids]):
        found = vectors(post(client, input=form, accept_ids=True))
        assert (found == vectors(post(client, input="abc"))).all()
        error = assert_refused(client.post(PATH, json={"input": form}))
        assert "check_embedding_ctx_length=False" in error["message"]
    for bad in ([VOCAB_SIZE], [[-1]], [[]]):
        assert_refused(client.post(PATH, json={"input": bad, "accept_ids": True}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": []},
        {"input": [1, "a"]},
        {"input": "a" * 64},
        {"input": "a", "encoding_format": "int8"},
        {"input": "a", "dimensions": 0},
        {"input": ["a"] * 2049},
        {"input": "a", "pooling": "mean"},
        {"input": "a", "truncate_prompt_tokens": 3},
    ],
)
def test_bad_requests_are_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert_refused(client.post(PATH, json=fields))


def test_a_long_list_needs_no_long_queue() -> None:
    texts = [f"text {i}" for i in range(100)]
    with serving(max_queue=0) as client:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: post(client, input=texts), range(2)))
        assert answers[0]["data"] == answers[1]["data"]
        found = vectors(answers[0])
        assert np.allclose(found[99], direct("text 99"), atol=1e-6)
        assert client.get("/stats").json()["running"] == 0


def test_streams_go_on_beside_embeddings(client: httpx.Client) -> None:
    body = {"prompt": "go", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    alone = post(client, "/v1/completions", **body)["choices"]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(post, client, input=TEXTS * 4) for _ in range(3)]
        beside = post(client, "/v1/completions", **body)["choices"]
        found = [vectors(job.result()) for job in jobs]
    assert beside[0]["text"] == alone[0]["text"]
    assert all((rows == found[0]).all() for rows in found)


def test_deadlines_and_names_and_keys_count(client: httpx.Client) -> None:
    assert_refused(client.post(PATH, json={"input": "a", "model": "other"}), 404)
    late = client.post(PATH, json={"input": ["a" * 50] * 200, "deadline_ms": 1})
    assert assert_refused(late, 504)["code"] == "deadline_exceeded"
    with serving(api_keys=("secret",)) as closed:
        assert closed.post(PATH, json={"input": "a"}).status_code == 401


def test_the_official_client_and_langchain(client: httpx.Client) -> None:
    url = f"{client.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as official:
        answer = official.embeddings.create(model="tiny", input=TEXTS)
    found = np.array([item.embedding for item in answer.data])
    assert np.allclose(found, vectors(post(client, input=TEXTS)), atol=1e-7)
    chain = OpenAIEmbeddings(
        model="tiny", base_url=url, api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    assert np.allclose(chain.embed_documents(TEXTS), found, atol=1e-7)


def test_ollama_client(client: httpx.Client) -> None:
    known = vectors(post(client, input=TEXTS))
    official = ollama.Client(host=str(client.base_url), trust_env=False)
    answer = official.embed(model="tiny", input=TEXTS)
    assert np.allclose(answer.embeddings, known, atol=1e-7)
    assert answer.prompt_eval_count == sum(len(text.encode()) + 1 for text in TEXTS)
    assert np.allclose(official.embed(model="tiny", input=TEXTS[0]).embeddings, known[:1])
    assert list(official.embed(model="tiny", input="").embeddings) == []
    older = official.embeddings(model="tiny", prompt=TEXTS[1])
    assert np.allclose(older.embedding, known[1])
    refusal = client.post("/api/embed", json={"model": "tiny", "input": [1]})
    assert refusal.status_code == 400
    assert "input" in refusal.json()["error"]
