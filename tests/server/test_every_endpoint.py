"""What every endpoint that takes a body owes to bad input: numbers, surrogates, a full queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from martlet.server.app import EMBEDDING, GENERATING, KINDS
from martlet.server.asking import Fields

from .scripted_engine import ScriptedEngine
from .serving import assert_works, chat_body, serving, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/show": {"model": "tiny"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/rerank": {"query": "hi", "documents": ["a"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
}
JSON = {"content-type": "application/json"}
NEVER_VALID = [str(2**63), "1e300", "true", "1.5"]
RARELY_VALID = ["-1", str(-(2**31)), str(2**31)]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def integers(kind: type[Fields], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the request has whole numbers, out of its own schema."""
    properties = kind.model_json_schema()["properties"]
    for name in kind.model_fields:
        if name in kind.NESTED:
            yield from integers(kind.NESTED[name], (*prefix, name))
            continue
        schema = properties.get(name) or {}
        types = [schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))]
        if "integer" in types:
            yield (*prefix, name)


def test_all_endpoints_are_looked_at() -> None:
    assert KINDS.keys() == BODIES.keys()
    assert ("options", "seed") in set(integers(KINDS["/api/chat"]))
    assert ("max_output_tokens",) in set(integers(KINDS["/v1/responses"]))


def nested(where: tuple[str, ...], value: str) -> str:
    for name in reversed(where):
        value = f'{{"{name}": {value}}}'
    return value[1:-1]


@pytest.mark.parametrize("path", BODIES)
def test_b86_integers_out_of_range_reach_no_engine(
    http: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    for where in integers(KINDS[path]):
        rest = {name: value for name, value in BODIES[path].items() if name != where[0]}
        for bad in NEVER_VALID + RARELY_VALID:
            n_before = len(engine.requests)
            text = f"{json.dumps(rest)[:-1]}{', ' if rest else ''}{nested(where, bad)}}}"
            answer = http.post(path, content=text, headers=JSON)
            if bad in NEVER_VALID:
                assert answer.status_code == 400, (where, bad)
            assert answer.status_code in (200, 400), (where, bad)
            assert answer.status_code == 200 or len(engine.requests) == n_before
            assert len(answer.content) < 4096 or answer.status_code == 200
    assert_works(http)


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/detokenize"])
@pytest.mark.parametrize("bad", [r"x \ud83d", r"\ude00"])
def test_b48_lone_surrogates_are_refused(http: httpx.Client, path: str, bad: str) -> None:
    text = json.dumps(BODIES[path]).replace('"hi"', f'"{bad}"').replace('"tiny"', f'"{bad}"')
    assert http.post(path, content=text, headers=JSON).status_code == 400
    pair = text.replace(bad, r"\ud83d\ude00")
    assert http.post(path, content=pair, headers=JSON).status_code in (200, 404)


def test_b82_no_prompt_as_long_as_the_context_reaches_the_engine() -> None:
    engine = ScriptedEngine(context=64)
    with serving(engine) as client:
        for path in (*GENERATING, *EMBEDDING):
            text = json.dumps(BODIES[path]).replace('"hi"', f'"{"y" * 64}"')
            answer = client.post(path, content=text, headers=JSON)
            assert answer.status_code == 400, path
            assert "64" in answer.text, path
        assert not engine.requests
        assert_works(client)


def test_b92_a_full_queue_is_a_503_whatever_asks() -> None:
    engine = ScriptedEngine(slots=1, max_queue=1)
    with serving(engine) as client, ThreadPoolExecutor(2) as pool:
        engine.unpaused.clear()
        path = "/v1/chat/completions"
        accepted = [pool.submit(client.post, path, json=chat_body()) for _ in range(2)]
        wait_until(lambda: len(engine.requests) == 2)
        for path in (*GENERATING, *EMBEDDING):
            answer = client.post(path, json=BODIES[path])
            assert answer.status_code == 503, path
            assert int(answer.headers["retry-after"]) >= 1
        assert len(engine.requests) == 2
        engine.unpaused.set()
        assert [answer.result().status_code for answer in accepted] == [200, 200]
        assert_works(client)
