"""A server over an engine that says one thing, and its clients, for tests that need nothing else.

It says hello, or what the test's module has as SAYS.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from .scripted_engine import ScriptedEngine, says
from .serving import serving


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return ScriptedEngine(says(getattr(request.module, "SAYS", "hello")))


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> httpx.Client:
    return http


@pytest.fixture(scope="module")
def official(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official
