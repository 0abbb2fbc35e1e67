"""lm-eval scores a served model as its logits say, though it knows nothing but the address.

The tool is large and not installed for tests: it runs where MARTLET_LM_EVAL names its program.
What it sends and how it reads the answers (version 0.4.13) is repeated here without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.model import Model, load_model
from martlet.scripts.logit_stats import log_softmax
from martlet.scripts.scored_text import chunk_step
from martlet.server import create_app

from ..scripts.tiny_file import write_tiny_model
from .serving import running_app

TASK = Path(__file__).parents[1] / "data" / "lm_eval"
PROGRAM = os.environ.get("MARTLET_LM_EVAL") or shutil.which("lm_eval")
MODELS = os.environ.get("MARTLET_TEST_MODELS")


@dataclass(frozen=True)
class Pair:
    """A context and a continuation whose likelihood is asked for."""

    context: list[int]
    ids: list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = Path(MODELS or "") / "smollm2.gguf"
    if not MODELS:
        path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    model = load_model(path, context=512, max_rows=48, gives_back=False)
    yield model
    model.close()


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASK / "questions.jsonl").read_text().splitlines()]


def pairs_of(encode: Any, questions: list[dict[str, Any]]) -> list[Pair]:
    pairs = []
    for question in questions:
        context = f"Question: {question['question']}\nAnswer:"
        for choice in question["choices"]:
            pairs.append(Pair(encode(context), encode(f"{context} {choice}")))
    return pairs


def likelihood(model: Model, pair: Pair) -> tuple[float, bool]:
    """Of the continuation, from the logits themselves, in float64."""
    import numpy as np

    n, start, executor = len(pair.ids), len(pair.context), model.executor
    parts = []
    for at in range(0, n, executor.max_rows):
        end = min(n, at + executor.max_rows)
        step = chunk_step(executor, pair.ids, at, end, np.arange(end - at))
        parts.append(executor.run(step))
    logits = np.concatenate(parts)[start - 1 : n - 1, : model.tokenizer.vocab_size]
    targets = pair.ids[start:]
    is_greedy = logits.argmax(axis=1).tolist() == targets
    return float(log_softmax(logits)[np.arange(n - start), targets].sum()), is_greedy


@pytest.fixture(scope="module")
def expected(model: Model, questions: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special=False, parse_special=True)

    return [likelihood(model, pair) for pair in pairs_of(encode, questions)]


@contextlib.contextmanager
def serving(model: Model) -> Iterator[str]:
    engine = Engine(model.executor, model.tokenizer, context=model.context)
    engine.start()
    try:
        app = create_app(engine, model.tokenizer, model_name="served", context=model.context)
        with running_app(app) as url:
            yield url
    finally:
        engine.close()


def test_its_requests_give_the_scores_of_the_logits(
    model: Model, questions: list[dict[str, Any]], expected: list[tuple[float, bool]]
) -> None:
    with serving(model) as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        assert "eos_token" in client.get("/tokenizer_info").json()

        def encode(text: str) -> list[int]:
            body = {"prompt": text, "add_special_tokens": False}
            ids: list[int] = client.post("/tokenize", json=body).json()["tokens"]
            return ids

        def score(pairs: list[Pair]) -> list[tuple[float, bool]]:
            fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
            body = {"model": "served", "prompt": [pair.ids for pair in pairs], **fields}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = []
            for choice, pair in zip(answer.json()["choices"], pairs, strict=True):
                logprobs = choice["logprobs"]
                own = logprobs["token_logprobs"][len(pair.context) : -1]
                top = logprobs["top_logprobs"][len(pair.context) : -1]
                is_greedy = all(a == max(b.values()) for a, b in zip(own, top, strict=True))
                found.append((sum(own), is_greedy))
            return found

        pairs = pairs_of(encode, questions)
        with ThreadPoolExecutor(8) as pool:
            singly = [found for [found] in pool.map(score, [[pair] for pair in pairs])]
            batches = [pairs[at : at + 5] for at in range(0, len(pairs), 5)]
            in_batches = [found for batch in pool.map(score, batches) for found in batch]
    assert singly == in_batches, "the same bits"
    assert [greedy for _, greedy in singly] == [greedy for _, greedy in expected]
    assert [lp for lp, _ in singly] == pytest.approx([lp for lp, _ in expected], rel=1e-7)


@pytest.mark.skipif(not PROGRAM, reason="MARTLET_LM_EVAL names no lm_eval program")
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_tool_itself_agrees(
    model: Model, expected: list[tuple[float, bool]], tmp_path: Path, batch_size: int
) -> None:
    shutil.copytree(TASK, tmp_path, dirs_exist_ok=True)
    with serving(model) as url:
        address = f"base_url={url}/v1/completions,model=served,num_concurrent=8,max_retries=1"
        command = [str(PROGRAM), "run", "--model", "local-completions"]
        command += ["--model_args", address, "--include_path", str(tmp_path)]
        command += ["--tasks", "martlet_questions", "--batch_size", str(batch_size)]
        command += ["--output_path", "out", "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "no_proxy": "127.0.0.1"}
        environ = {**os.environ, **offline, "HF_HOME": str(tmp_path / "hf")}
        ran = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Using remote tokenizer" in ran.stderr + ran.stdout
    [samples] = tmp_path.glob("out/**/samples_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda s: s["doc_id"])
    found = [(float(lp), greedy == "True") for s in lines for [[lp, greedy]] in s["resps"]]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [lp for lp, _ in found] == pytest.approx([lp for lp, _ in expected], rel=1e-7)
