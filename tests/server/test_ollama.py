"""Ollama's dialect, by its own client over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import ollama
import pytest
from martlet.server.ollama import API_VERSION, NOT_HERE
from martlet.server.ollama_schema import OPTIONS, REQUEST, OllamaChat, OllamaGenerate, OllamaRequest

from .scripted_engine import THINKING, ScriptedEngine, byte_tokenizer, says
from .serving import prompt_of, serving, wait_until

HI = [{"role": "user", "content": "hi"}]


SAYS = "hellö"


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> ollama.Client:
    return official(http)


def official(http: httpx.Client, **headers: str) -> ollama.Client:
    return ollama.Client(host=str(http.base_url), headers=headers, trust_env=False)


def error_of(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()
    assert set(error) == {"error"}
    return error["error"]


def test_chat_whole(client: ollama.Client, engine: ScriptedEngine) -> None:
    answer = client.chat("tiny", HI, options={"temperature": 0, "num_predict": 50})
    assert answer.message.content == "hellö"
    assert (answer.message.role, answer.done, answer.done_reason) == ("assistant", True, "stop")
    assert answer.model == "tiny"
    assert answer.prompt_eval_count == len(engine.requests[-1].prompt_ids)
    assert answer.eval_count == len("hellö".encode()) + 1
    assert answer.total_duration
    assert answer.prompt_eval_duration is not None
    assert answer.eval_duration is not None
    parts = answer.prompt_eval_duration + answer.eval_duration
    assert parts <= answer.total_duration < parts + 5_000_000_000
    params = engine.requests[-1].params
    assert (params.temperature, params.max_tokens) == (0, 50)


def test_streaming_is_what_http_gives_unasked(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json={"model": "tiny", "messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.text.endswith("}\n")
    assert "".join(line["message"]["content"] for line in lines) == "hellö"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all("done_reason" not in line for line in lines[:-1])
    assert len({line["created_at"] for line in lines}) == 1


def test_chat_streamed_by_both_clients(http: httpx.Client, client: ollama.Client) -> None:
    parts = list(client.chat("tiny", HI, stream=True, options={"num_predict": 2}))
    assert "".join(part.message.content or "" for part in parts) == "he"
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 2)

    async def other() -> str:
        asynchronous = ollama.AsyncClient(host=str(http.base_url), trust_env=False)
        stream = await asynchronous.chat("tiny", HI, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(other()) == "hellö"


def test_generate(client: ollama.Client, engine: ScriptedEngine) -> None:
    answer = client.generate("tiny", "hi", system="Be kind.")
    assert (answer.response, answer.done_reason) == ("hellö", "stop")
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe kind.<|im_end|><|im_start|>user\nhi<|im_end|>"
        "<|im_start|>assistant\n"
    )
    client.generate("tiny", "<|im_start|>x", raw=True)
    assert prompt_of(engine) == "<|im_start|>x"
    streamed = client.generate("tiny", "hi", stream=True, options={"stop": ["lö"]})
    assert "".join(part.response or "" for part in streamed) == "hel"


def test_options_reach_the_sampler(client: ollama.Client, engine: ScriptedEngine) -> None:
    client.chat("tiny", HI)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
    assert (params.repetition_penalty, params.seed, params.max_tokens) == (1.0, None, None)
    options = {
        **{"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "seed": 7},
        **{"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        **{"stop": "x", "num_ctx": 100, "num_predict": -1, "num_thread": 3},
    }
    client.chat("tiny", HI, options=options)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.4)
    assert (params.min_p, params.seed, params.stop) == (0.1, 7, ("x",))
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.3)
    assert params.frequency_penalty == 0.2
    client.chat("tiny", HI, options={"repeat_penalty": 1.2, "repeat_last_n": 0})
    assert engine.requests[-1].params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_ctx": 4097}, "options.num_ctx: 4097 tokens, this server has 4096"),
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": "5"}, "options.num_predict"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"top_p": 2.0}, "top_p"),
        ({"mirostat": 2}, "options.mirostat"),
        ({"typical_p": 0.5}, "options.typical_p"),
    ],
)
def test_bad_options_are_named(client: ollama.Client, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ollama.ResponseError, match=named) as caught:
        client.chat("tiny", HI, options=options)
    assert caught.value.status_code == 400


BODIES: dict[str, tuple[type[OllamaRequest], dict[str, Any]]] = {
    "/api/chat": (OllamaChat, {"messages": HI}),
    "/api/generate": (OllamaGenerate, {"prompt": "hi"}),
}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (p, f)
        for p, (kind, _) in BODIES.items()
        for f in sorted(REQUEST.refused.keys() - kind.model_fields)
    ],
)
def test_fields_we_cannot_obey_are_refused_by_name(
    http: httpx.Client, path: str, field: str
) -> None:
    body = BODIES[path][1]
    assert error_of(http.post(path, json={**body, field: ["x"]})).startswith(f"{field}: ")
    for neutral in REQUEST.refused[field].neutral:
        assert http.post(path, json={**body, field: neutral}).status_code == 200


@pytest.mark.parametrize("option", sorted(OPTIONS.refused.keys() | OPTIONS.no_effect))
def test_options_are_refused_by_name_or_have_no_effect(http: httpx.Client, option: str) -> None:
    answer = http.post("/api/chat", json={"messages": HI, "options": {option: 17}})
    if option in OPTIONS.refused:
        assert error_of(answer).startswith(f"options.{option}: ")
    else:
        assert answer.status_code == 200
        assert "x-martlet-ignored" not in answer.headers


def test_unknown_fields_are_told(http: httpx.Client) -> None:
    body = {"messages": HI, "temperature": 1, "options": {"frob": 1}, "keep_alive": "5m"}
    answer = http.post("/api/chat", json=body)
    assert answer.headers["x-martlet-ignored"] == "temperature, options.frob, keep_alive"


def test_messages_with_tools_in_their_history_and_without_images(
    client: ollama.Client, engine: ScriptedEngine
) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "22", "tool_name": "f"},
    ]
    client.chat("tiny", messages)
    assert "<|im_start|>tool\n22<|im_end|>" in prompt_of(engine)
    assert "None" not in prompt_of(engine)
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images: only text"):
        client.chat("tiny", [{"role": "user", "content": "hi", "images": ["aGk="]}])


def test_thinking() -> None:
    engine = ScriptedEngine(says("<think>hm</think>yes"), tokenizer=byte_tokenizer(THINKING))
    with serving(engine) as http:
        client = official(http)
        for think in (None, True, "low"):
            message = client.chat("tiny", HI, think=think).message  # type: ignore[arg-type]
            assert (message.thinking, message.content) == ("hm", "yes")
        parts = list(client.chat("tiny", HI, think=True, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "hm"
        assert "".join(part.message.content or "" for part in parts) == "yes"
        generated = client.generate("tiny", "hi", think=True)
        assert (generated.thinking, generated.response) == ("hm", "yes")
        client.chat("tiny", HI, think=False)
        assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
        assert client.show("tiny").capabilities == ["completion", "tools", "thinking"]


def test_thinking_a_model_cannot_do(client: ollama.Client) -> None:
    assert client.chat("tiny", HI, think=False).message.content == "hellö"
    with pytest.raises(ollama.ResponseError, match="think: this model does not support thinking"):
        client.chat("tiny", HI, think=True)


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat("tiny", HI, logprobs=True, top_logprobs=2)
    assert answer.logprobs
    assert [entry.token for entry in answer.logprobs[:4]] == ["h", "e", "l", "l"]
    assert len(answer.logprobs) == answer.eval_count
    assert len(answer.logprobs[0].top_logprobs or []) == 2
    streamed = client.generate("tiny", "hi", stream=True, logprobs=True)
    names = [entry.token for part in streamed for entry in part.logprobs or []]
    assert names == [entry.token for entry in answer.logprobs]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": "", "keep_alive": 0})],
)
def test_an_empty_request_only_loads(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    n_before = len(engine.requests)
    for stream in (True, False):
        answer = http.post(path, json={"model": "tiny", "stream": stream, **body}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")  # a lone model stays
    assert len(engine.requests) == n_before


def test_a_lone_model_stays_and_that_is_said(http: httpx.Client, client: ollama.Client) -> None:
    for keep_alive, ignored in ((0, "keep_alive"), ("5m", "keep_alive"), (-1, None), (None, None)):
        body = {"model": "tiny", "prompt": "hi", "stream": False, "keep_alive": keep_alive}
        answer = http.post("/api/generate", json=body)
        assert answer.status_code == 200
        assert answer.headers.get("x-martlet-ignored") == ignored
    [running] = client.ps().models
    assert running.expires_at
    assert running.expires_at.year > 2090


def test_names(client: ollama.Client) -> None:
    assert client.chat("tiny:latest", HI).model == "tiny:latest"
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        client.chat("other", HI)
    assert caught.value.status_code == 404


def test_what_is_told_of_the_model(client: ollama.Client, http: httpx.Client) -> None:
    [model] = client.list().models
    assert (model.model, model.details.format) == ("tiny", "gguf")  # type: ignore[union-attr]
    assert model.modified_at
    assert client.ps().models[0].context_length == 4096
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template
    assert shown.template.startswith("{% for m in messages %}")
    assert http.get("/api/version").json() == {"version": API_VERSION}
    assert http.head("/").status_code == http.head("/api/version").status_code == 200
    assert error_of(http.post("/api/show", json={"model": "other"}), 404)


@pytest.mark.parametrize(("method", "path"), NOT_HERE)
def test_what_this_server_does_not_do_is_said_in_words(
    http: httpx.Client, method: str, path: str
) -> None:
    path = path.replace("{digest}", "sha256:00")
    answer = http.request(method, path, json={"model": "x"})
    assert answer.status_code == 400
    assert method == "HEAD" or error_of(answer).startswith("/api/")


def test_pull_raises_in_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="martlet pull"):
        client.pull("other")


def test_failure_in_mid_stream_raises_in_the_client() -> None:
    with serving(ScriptedEngine(fail_at=2)) as http:
        client = official(http)
        with pytest.raises(ollama.ResponseError, match="scripted fault"):
            list(client.chat("tiny", HI, stream=True))
        with pytest.raises(ollama.ResponseError, match="scripted fault"):
            client.chat("tiny", HI)


def test_signs_of_life_are_empty_pieces() -> None:
    with serving(ScriptedEngine(prefill_s=0.3), grace_s=0.01, ping_s=0.05) as http:
        parts = list(official(http).chat("tiny", HI, stream=True))
        assert "".join(part.message.content or "" for part in parts) == "hello"
        assert [part.message.content for part in parts[:2]] == ["", ""]


def test_who_leaves_is_cancelled() -> None:
    engine = ScriptedEngine(says("x", end=False), token_s=0.01)
    with serving(engine) as http:
        stream = official(http).chat("tiny", HI, stream=True)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: engine.n_unfinished == 0)


def test_doors_are_the_same() -> None:
    with serving(ScriptedEngine(), api_keys=("secret",), origins=("http://page",)) as http:
        assert "API key" in error_of(http.post("/api/chat", json={"messages": HI}), 401)
        assert error_of(http.get("/api/tags"), 401)
        client = official(http, Authorization="Bearer secret")
        assert client.chat("tiny", HI).message.content == "hello"
        asks = {"origin": "http://page", "access-control-request-method": "POST"}
        assert http.options("/api/chat", headers=asks).status_code == 200
        assert error_of(http.get("/api/nothing", headers={"x-api-key": "secret"}), 404)
    with serving(ScriptedEngine()) as http:
        plain = http.post("/api/chat", content=b"{}", headers={"content-type": "text/plain"})
        assert "application/json" in error_of(plain, 415)
