"""How a request asks to be served: class of service, deadline, several answers to one prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from martlet.runtime.engine import Engine

from ..runtime.scripted import ScriptedExecutor, hashed
from .scripted_engine import byte_tokenizer
from .serving import assert_refused, serving_engine

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
