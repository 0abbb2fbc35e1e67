"""Tokenizing over HTTP, in vLLM's words and in llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .scripted_engine import BOS, END, START, VOCAB_SIZE, ScriptedEngine, byte_tokenizer
from .serving import assert_refused, serving

TEXT = "héllo"
IDS = list(TEXT.encode())


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(add_bos=True))) as client:
        yield client


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_dialect_has_its_own_default_of_special_tokens(client: httpx.Client) -> None:
    answer = post(client, "/tokenize", prompt=TEXT)
    assert answer == {
        "count": len(IDS) + 1,
        "max_model_len": 4096,
        "tokens": [BOS, *IDS],
        "token_strs": None,
    }
    assert post(client, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"] == IDS
    assert post(client, "/tokenize", content=TEXT)["tokens"] == IDS
    assert post(client, "/tokenize", content=TEXT, add_special=True)["tokens"] == [BOS, *IDS]
    assert post(client, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


def test_control_tokens_are_read_unless_they_are_not_wanted(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"content": "<|im_end|>"}
    assert post(client, "/tokenize", **asked)["tokens"] == [END]
    assert len(post(client, "/tokenize", **asked, parse_special=False)["tokens"]) == 10


def test_pieces_and_strings(client: httpx.Client) -> None:
    pieces = post(client, "/tokenize", content="é!", with_pieces=True)["tokens"]
    assert pieces == [
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": 33, "piece": "!"},
    ]
    answer = post(client, "/tokenize", prompt="a", return_token_strs=True)
    assert answer["token_strs"] == ["<s>", "a"]


def test_messages_are_tokenized_as_the_chat_route_would(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    tokens = post(client, "/tokenize", messages=messages)["tokens"]
    usage = post(client, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]
    assert len(tokens) == usage["prompt_tokens"]
    assert (tokens.count(START), tokens.count(END)) == (2, 1), "content makes no control token"
    short = post(client, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert tokens[: len(short)] == short
    assert len(short) < len(tokens)


def test_detokenize_is_the_way_back(client: httpx.Client) -> None:
    answer = post(client, "/detokenize", tokens=[BOS, *IDS])
    assert answer == {"prompt": f"<s>{TEXT}", "content": f"<s>{TEXT}"}
    assert post(client, "/detokenize", tokens=[])["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_values_are_named(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert assert_refused(client.post(path, json=body))["param"] == param


def test_names_of_models_count_here_too(client: httpx.Client) -> None:
    assert_refused(client.post("/tokenize", json={"prompt": "a", "model": "other"}), 404)
    answer = client.post("/tokenize", json={"prompt": "a", "model": "tiny", "odd": 1})
    assert answer.headers["x-martlet-ignored"] == "odd"


def test_tokenizer_info_has_what_scoring_tools_ask(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "<|im_end|>", None)
    assert "add_generation_prompt" in info["chat_template"]
    assert (info["model_max_length"], info["vocab_size"]) == (4096, VOCAB_SIZE)
    assert info["add_bos_token"] is True
    tokens = post(client, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert tokens == [END], "as lm-eval finds the id of the end"


def test_keys_guard_these_routes() -> None:
    with serving(ScriptedEngine(), api_keys=("secret",)) as client:
        assert client.get("/tokenizer_info").status_code == 401
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 401
