"""Each honoured field of the sampler shows in the answer; none is only read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from martlet.runtime.engine import Engine
from martlet.runtime.rejection import Distribution
from martlet.runtime.speculation import Speculation
from martlet.runtime.tokenizer import Tokenizer
from martlet.server.schema import Generation, Sampled

from ..runtime.guessing import ChanceDrafter
from ..runtime.scripted import ScriptedExecutor
from .scripted_engine import END, VOCAB_SIZE, ScriptedEngine, byte_tokenizer
from .serving import assert_refused, serving_engine
from .serving import serving as serving_scripted

PATH = "/v1/completions"
BEFORE, BEHIND, GAP = 253, 254, 255  # bytes that no text has


def letters(history: np.ndarray) -> np.ndarray:
    """ "a" is the likeliest by far, then b, c, …; after the 20th token the end is."""
    logits = np.full(VOCAB_SIZE, -50, np.float32)
    logits[97:107] = np.linspace(3, 0, 10)
    if len(history) >= 20:
        logits[END] = 9
    return logits


def tokenizer_of(**metadata: Any) -> Tokenizer:
    from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER

    letters_of = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [letters_of[byte] for byte in range(256)] + ["<e>"],
            "tokenizer.ggml.token_type": [1] * 253 + [3] * 4,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 256,
            **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in metadata.items()},
        }
    )


@contextlib.contextmanager
def serving() -> Iterator[httpx.Client]:
    tokenizer = byte_tokenizer()
    guessed = Distribution(np.arange(97, 107), np.linspace(1, 3, 10))
    speculation = Speculation(ChanceDrafter(guessed), length=3)
    engine = Engine(ScriptedExecutor(letters), tokenizer, context=64, speculation=speculation)
    with serving_engine(engine, tokenizer) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as client:
        yield client


HOT: dict[str, Any] = {"temperature": 5, "seed": 1}
COLD: dict[str, Any] = {"temperature": 0}
AS = "a" * 12
END_AT = ("a" * 4, "a" * 8)


def until_b(text: str) -> str:
    assert "b" in text[1:], "a case of something"
    return text[: text.index("b")]


# field -> (what is asked beside it, its value, what the text of 12 tokens is without and with it)
EFFECTS: dict[str, tuple[dict[str, Any], Any, Callable[[str, str], bool]]] = {
    "temperature": ({"seed": 1}, 0, lambda bare, text: bare != AS == text),
    "top_k": (HOT, 1, lambda bare, text: bare != AS == text),
    "top_p": (HOT, 0, lambda bare, text: bare != AS == text),
    "min_p": (HOT, 1, lambda bare, text: bare != AS == text),
    "seed": ({"temperature": 5}, 7, lambda bare, text: bare != text),
    "stop": (COLD, ["zz", "aaa"], lambda bare, text: bare == AS and text == ""),
    "ignore_eos": (
        {**COLD, "prompt": "p" * 16},
        True,
        lambda bare, text: bare == "aaaa" and text == "aaaa",
    ),
    "min_tokens": ({**COLD, "prompt": "p" * 16}, 8, lambda bare, text: (bare, text) == END_AT),
    "stop_token_ids": ({"prompt": "p" * 8, **HOT}, [98], lambda bare, text: text == until_b(bare)),
    "logit_bias": (COLD, {"97": -100}, lambda bare, text: text == "b" * 12),
    "presence_penalty": (COLD, 2, lambda bare, text: len(set(text)) > 1),
    "frequency_penalty": (COLD, 2, lambda bare, text: len(set(text)) > 2),
    "repetition_penalty": (COLD, 100, lambda bare, text: len(set(text)) > 2),
    "speculate_rule": (HOT, "reject", lambda bare, text: bare != text),
    "max_tokens": (COLD, 3, lambda bare, text: text == "aaa"),
    "max_completion_tokens": (COLD, 4, lambda bare, text: text == "aaaa"),
}


@pytest.mark.parametrize("field", EFFECTS)
def test_each_field_shows(client: httpx.Client, field: str) -> None:
    beside, value, shows = EFFECTS[field]

    def ask(**fields: Any) -> Any:
        body = {"prompt": "p", "max_tokens": 12, **beside, **fields}
        if field == "max_completion_tokens":
            del body["max_tokens"]
            body = {"max_completion_tokens": 12, **body}
        answer = client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    bare, changed = ask(), ask(**{field: value})
    assert shows(bare["choices"][0]["text"], changed["choices"][0]["text"])
    if field == "ignore_eos":
        counts = [answer["usage"]["completion_tokens"] for answer in (bare, changed)]
        assert counts == [5, 12]
    if field == "seed":
        assert ask(seed=value)["choices"][0]["text"] == changed["choices"][0]["text"]


def test_no_field_of_the_sampler_was_forgotten() -> None:
    limits = {"max_tokens", "max_completion_tokens"}
    lists = {"stop", "stop_token_ids"}
    assert set(EFFECTS) == {*Sampled.SAMPLING, *lists, *limits}
    assert set(EFFECTS) <= Generation.model_fields.keys()


def test_stop_strings_count_behind_the_least_length(client: httpx.Client) -> None:
    body = {"prompt": "p", "max_tokens": 12, "stop": "aa", "min_tokens": 5, **COLD}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aaaaa", "stop")
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "min_tokens is 13": ("min_tokens", {"min_tokens": 13}),
        f"vocabulary has {VOCAB_SIZE}": ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
        "a constrained answer": ("min_tokens", {"guided_regex": "[ab]+"}),
    }
    for message, (param, fields) in wrong.items():
        error = assert_refused(client.post(PATH, json={**body, **fields}))
        assert message in error["message"]
        assert error["param"] == param


@pytest.mark.parametrize("of_chat", [False, True])
def test_token_ids_whole_and_streamed(client: httpx.Client, of_chat: bool) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True, "stop": "cc", **HOT}
    asked |= {"messages": [{"role": "user", "content": "p"}]} if of_chat else {"prompt": "p"}
    path = "/v1/chat/completions" if of_chat else PATH
    whole = client.post(path, json=asked).json()
    (choice,) = whole["choices"]
    prompt = (whole if of_chat else choice)["prompt_token_ids"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    assert prompt[-1] == ord("p") if not of_chat else ord("p") in prompt
    assert len(prompt) == whole["usage"]["prompt_tokens"]

    answer = client.post(path, json={**asked, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    entries = [entry for chunk in chunks for entry in chunk["choices"]]
    assert [id_ for entry in entries for id_ in entry["token_ids"]] == choice["token_ids"]
    tellers = chunks if of_chat else entries
    told = [teller["prompt_token_ids"] for teller in tellers if "prompt_token_ids" in teller]
    assert told == [prompt], "once, with the first chunk"
    without = client.post(path, json={**asked, "return_token_ids": False}).text
    assert "token_ids" not in without


# ---- suffix --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "roles", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")]
)
def test_a_suffix_is_put_behind_the_gap(roles: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of(**dict(zip(roles, (BEFORE, BEHIND, GAP), strict=True)))
    engine = ScriptedEngine(tokenizer=tokenizer)
    with serving_scripted(engine) as client:
        for path, body in (
            (PATH, {"prompt": "ab"}),
            (PATH, {"prompt": list(b"ab")}),
            ("/api/generate", {"prompt": "ab", "stream": False}),
        ):
            answer = client.post(path, json={**body, "suffix": "yz <e>"})
            assert answer.status_code == 200, answer.text
            given = engine.requests[-1].prompt_ids
            assert given == [BEFORE, *b"ab", BEHIND, *b"yz <e>", GAP], "content stays letters"
        assert_refused(client.post(PATH, json={"prompt": "a", "suffix": "b", "echo": True}))
        shown = client.post("/api/show", json={"model": "tiny"}).json()
        assert "insert" in shown["capabilities"]


@pytest.mark.parametrize("metadata", [{}, {"fim_pre": BEFORE, "fim_suf": BEHIND}])
def test_a_model_without_all_three_marks_refuses_a_suffix(metadata: dict[str, int]) -> None:
    with serving_scripted(ScriptedEngine(tokenizer=tokenizer_of(**metadata))) as client:
        error = assert_refused(client.post(PATH, json={"prompt": "a", "suffix": "b"}))
        assert error["param"] == "suffix"
        assert client.post(PATH, json={"prompt": "a", "suffix": ""}).status_code == 200
        refusal = client.post("/api/generate", json={"model": "tiny", "prompt": "a", "suffix": "b"})
        assert refusal.status_code == 400
