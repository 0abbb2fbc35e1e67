"""Which models are there, under which names; and what their templates take or refuse."""

from __future__ import annotations

import httpx
import openai

from .scripted_engine import ScriptedEngine, byte_tokenizer
from .serving import assert_refused, assert_works, chat_body, serving


def test_models_health_and_unknown_names(client: httpx.Client, official: openai.OpenAI) -> None:
    assert [m.id for m in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").owned_by == "martlet"
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
    assert client.get("/health").json() == {"status": "ok"}
    unknown = client.get("/v1/models/org/other")
    assert assert_refused(unknown, 404)["code"] == "model_not_found"
    answer = client.post("/v1/chat/completions", json={**chat_body(), "model": "other"})
    assert assert_refused(answer, 404)["code"] == "model_not_found"
    assert_refused(client.get("/nowhere"), 404)
    assert_refused(client.get("/v1/completions"), 405)
    assert_works(client)


def test_alias_is_echoed() -> None:
    with serving(ScriptedEngine(), model_aliases=("gpt-x",)) as client:
        body = {**chat_body(), "model": "gpt-x"}
        assert client.post("/v1/chat/completions", json=body).json()["model"] == "gpt-x"


def test_model_without_template_still_completes() -> None:
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(None))) as client:
        error = assert_refused(client.post("/v1/chat/completions", json=chat_body()))
        assert "/v1/completions" in error["message"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_b76_template_refusal_is_a_400_with_its_text() -> None:
    template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}x"
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(template))) as client:
        messages = [{"role": "system", "content": "a"}]
        error = assert_refused(client.post("/v1/chat/completions", json={"messages": messages}))
        assert error["message"] == "no system here"
        assert_works(client)


def test_b60_tool_history_is_accepted(client: httpx.Client, engine: ScriptedEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200
    prompt = bytes(i for i in engine.requests[-1].prompt_ids if i < 256).decode()
    assert "None" not in prompt
    assert "null" not in prompt
