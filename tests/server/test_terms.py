"""How a request asks to be served: class of service, deadline, several answers, adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.errors import RequestError
from martlet.runtime.step import Step
from martlet.server import ServerOptions
from martlet.server.app import create_app

from ..runtime.scripted import ScriptedExecutor, hashed
from .scripted_engine import byte_tokenizer
from .serving import assert_refused, client_of, serving_engine

PATH = "/v1/completions"


@contextlib.contextmanager
def serving_slowly(
    seconds_per_step: float = 0.0,
) -> Iterator[tuple[httpx.Client, ScriptedExecutor, Engine]]:
    executor = ScriptedExecutor(hashed(90), seconds_per_step=seconds_per_step)
    tokenizer = byte_tokenizer()
    engine = Engine(executor, tokenizer, context=512)
    with serving_engine(engine, tokenizer) as client:
        yield client, executor, engine


def test_a_deadline_ends_in_an_error_and_not_in_a_finish_reason() -> None:
    with serving_slowly(0.02) as (client, _, engine):
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        answer = client.post(PATH, json={**body, "deadline_ms": 100})
        error = assert_refused(answer, 504)
        assert error["code"] == "deadline_exceeded"
        assert "100 ms" in error["message"]
        streamed = client.post(PATH, json={**body, "deadline_ms": 100, "stream": True}).text
        last = json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in streamed
        assert engine.stats().finished["deadline"] == 2


@pytest.mark.parametrize("bad", [0, -1, 1.5, "10", True])
def test_deadlines_are_positive_integers(bad: Any) -> None:
    with serving_slowly() as (client, _, _):
        error = assert_refused(client.post(PATH, json={"prompt": "a", "deadline_ms": bad}))
        assert error["param"] == "deadline_ms"


def test_flex_is_served_behind_the_others_and_unknown_tiers_are_refused() -> None:
    services = []
    with serving_slowly() as (client, _, engine):
        submit = engine.submit

        def recording(*arguments: Any, **options: Any) -> Any:
            services.append(options["service"])
            return submit(*arguments, **options)

        engine.submit = recording  # type: ignore[method-assign]
        for tier in ("flex", "auto", "default"):
            body = {"prompt": "a", "max_tokens": 1, "service_tier": tier}
            assert client.post(PATH, json=body).status_code == 200
        assert_refused(client.post(PATH, json={"prompt": "a", "service_tier": "best"}))
    assert services == ["background", "interactive", "interactive"]


def test_several_answers_share_the_blocks_of_their_prompt() -> None:
    with serving_slowly(0.001) as (client, executor, _):
        body = {"prompt": "x" * 200, "n": 4, "max_tokens": 2, "seed": 1, "temperature": 1.0}
        answer = client.post(PATH, json=body).json()
        assert len(answer["choices"]) == 4
        assert answer["usage"]["prompt_tokens"] == 200
        prompt_rows = sum(step.n_rows for step in executor.steps) - 4
        assert prompt_rows == 200 + 3, "once, and three times the last token"


# -- adapters -----------------------------------------------------------------------------------


@contextlib.contextmanager
def serving_adapters() -> Iterator[tuple[httpx.Client, list[Any]]]:
    """Two adapters, of which all requests get the second; and what the engine was asked for."""
    executor, tokenizer = ScriptedExecutor(hashed(90)), byte_tokenizer()
    engine = Engine(executor, tokenizer, context=512, adapters=(0.0, 1.0))
    app = create_app(engine, tokenizer, model_name="tiny", context=512, adapters=("terse", "kind"))
    engine.start()
    shares: list[Any] = []
    try:
        run = executor.run

        def recording(step: Step) -> Any:
            shares.append(step.adapters[0].tolist())
            return run(step)

        executor.run = recording  # type: ignore[method-assign]
        with client_of(app) as client:
            yield client, shares
    finally:
        engine.close()


def test_requests_get_the_adapter_they_are_addressed_to_or_ask_for() -> None:
    asked: list[tuple[dict[str, Any], list[float]]] = [
        ({}, [0.0, 1.0]),
        ({"model": "tiny"}, [0.0, 1.0]),
        ({"model": "terse"}, [1.0, 0.0]),
        ({"model": "terse:latest"}, [1.0, 0.0]),
        ({"lora": []}, [0.0, 0.0]),
        ({"lora": [{"id": 0, "scale": 0.5}]}, [0.5, 0.0]),
        ({"model": "terse", "lora": [{"id": 1, "scale": -2}]}, [0.0, -2.0]),
    ]
    with serving_adapters() as (client, shares):
        for extra, expected in asked:
            shares.clear()
            body = {"prompt": "abc", "max_tokens": 1, **extra}
            answer = client.post(PATH, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == extra.get("model", "tiny")
            assert shares == [expected]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([{"id": 2, "scale": 1}], "there is no adapter 2; this model has 2"),
        ([{"id": -1, "scale": 1}], "greater than or equal to 0"),
        ([{"id": 0}], "Field required"),
        ([{"id": 0, "scale": "1"}], "valid number"),
        ([{"id": 0, "scale": 1e39}], "float32"),
        ("terse", "valid list"),
    ],
)
def test_adapters_that_are_not_there_are_refused(bad: Any, message: str) -> None:
    with serving_adapters() as (client, _):
        error = assert_refused(client.post(PATH, json={"prompt": "a", "lora": bad}))
    assert error["param"].startswith("lora")
    assert message in error["message"]


def test_an_adapter_called_as_the_model_is_refused() -> None:
    tokenizer = byte_tokenizer()
    engine = Engine(ScriptedExecutor(hashed(90)), tokenizer, context=512, adapters=(0.0,))
    options = ServerOptions(model_aliases=("other",))
    for name in ("tiny", "other"):
        with pytest.raises(RequestError, match=f"both called '{name}'"):
            create_app(engine, tokenizer, model_name="tiny", adapters=(name,), options=options)


def test_models_list_adapters_with_their_numbers() -> None:
    with serving_adapters() as (client, _):
        found = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert [(m.get("parent"), m.get("lora_id")) for m in found.values()] == [
        (None, None),
        ("tiny", 0),
        ("tiny", 1),
    ]
