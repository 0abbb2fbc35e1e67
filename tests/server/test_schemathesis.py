"""schemathesis, from /openapi.json alone, finds no answer that is not declared there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from martlet.server import create_app

from .scripted_engine import ScriptedEngine
from .serving import assert_works, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis import GenerationMode, checks  # noqa: E402

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def operations() -> list[str]:
    engine = ScriptedEngine()
    app = create_app(engine, engine.tokenizer, model_name="tiny", context=engine.context)
    paths = app.state.document["paths"]
    return [f"{method} {path}" for path, methods in paths.items() for method in methods]


N_CASES = {"get": 2, "post": 4}
QUICKLY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,  # the same cases each time
    "database": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine()) as client:
        yield client


@pytest.fixture(scope="module")
def schema(client: httpx.Client) -> Any:
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", operations())
def test_answers_are_as_declared(
    operation: str, mode: Any, client: httpx.Client, schema: Any
) -> None:
    method, path = operation.split()
    if mode is GenerationMode.NEGATIVE and method == "get":
        pytest.skip("there is nothing to get wrong in a GET")

    with requests.Session() as session:
        session.trust_env = False

        @settings(max_examples=N_CASES[method], **QUICKLY)
        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            answer = case.call(base_url=str(client.base_url), session=session)
            case.validate_response(answer, checks=CHECKS)

        ask()
    assert_works(client)
