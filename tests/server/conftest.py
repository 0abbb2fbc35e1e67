"""A server over an engine that says hello, and its clients, for tests that need nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from .scripted_engine import ScriptedEngine, serving


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


@pytest.fixture(scope="module")
def official(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official
