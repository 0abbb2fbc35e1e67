"""Tools over a real socket: calls that the model writes by itself, by the official client."""

from __future__ import annotations

from typing import Any

import pytest
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER

from .scripted_engine import END, ScriptedEngine
from .serving import chat_body, serving
from .tool_cases import (
    LLAMA,
    MESSAGES,
    MISTRAL,
    PATH,
    ROME,
    TEXT,
    TOOLS,
    called,
    official,
    scripted,
    streamed,
)


def test_b62_two_calls_whole_and_streamed() -> None:
    text = "One moment.\n" + called("weather", ROME) + "\n" + called("note", TEXT)
    with official(scripted(text)) as client:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
        last, deltas = streamed(client, tools=TOOLS)
    for choice in (whole.choices[0], last):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "One moment."
        calls = choice.message.tool_calls
        assert calls
        assert [(c.type, c.function.name) for c in calls] == [
            ("function", "weather"),
            ("function", "note"),
        ]
        assert [c.function.arguments for c in calls] == [ROME, TEXT]
        assert len({c.id for c in calls}) == 2
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    for nth in (0, 1):
        first, *rest = [piece for piece in pieces if piece.index == nth]
        assert first.id
        assert first.type == "function"
        assert first.function.name
        assert first.function.arguments == ""
        assert len(rest) > 5  # as it is written, not at the end
        assert all(p.id is None and p.function.name is None for p in rest)


def test_b62_a_call_that_is_cut_says_so() -> None:
    text = called("weather", ROME) + "\n" + called("note", TEXT)
    with official(scripted(text)) as client:
        n = len(called("weather", ROME)) + len('\n<tool_call>\n{"name": "note", "arguments": {"te')
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=n
        )
        choice = whole.choices[0]
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls
        assert [c.function.arguments for c in choice.message.tool_calls] == [ROME, '{"te']


def test_an_answer_without_a_call_is_an_answer() -> None:
    with official(scripted("Just <b>text</b> { } ")) as client:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
        last, _ = streamed(client, tools=TOOLS)
    for choice in (whole.choices[0], last):
        assert choice.finish_reason == "stop"
        assert choice.message.content == "Just <b>text</b> { } "
        assert not choice.message.tool_calls


def test_no_tools_no_calls() -> None:
    text = called("weather", ROME)
    with serving(scripted(text)) as client:
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = client.post(PATH, json=chat_body(**fields)).json()["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["finish_reason"] == "stop"


def test_llama_writes_bare_json() -> None:
    with official(scripted(f'{{"name": "weather", "parameters": {ROME}}}', LLAMA)) as client:
        last, _ = streamed(client, tools=TOOLS)
        assert last.message.tool_calls
        assert last.message.tool_calls[0].function.arguments == ROME
        assert not last.message.content
    with official(scripted('{"city": "Rome"}', LLAMA)) as client:
        last, _ = streamed(client, tools=TOOLS)
        assert (last.finish_reason, last.message.content) == ("stop", '{"city": "Rome"}')


def mistral_tokenizer() -> tuple[Tokenizer, int]:
    """One whose marker is a control token; gives its id, too."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    specials = ["<s>", "<|im_start|>", "<|im_end|>", "<unk>", "[TOOL_CALLS]"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [letters[byte] for byte in range(256)] + specials,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 2, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": MISTRAL,
    }
    return Tokenizer.from_metadata(metadata), 260


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_mistral_marks_calls_by_a_control_token(choice: str) -> None:
    tokenizer, marker = mistral_tokenizer()
    calls = f'[{{"name": "weather", "arguments": {ROME}}}, {{"name": "note", "arguments": {TEXT}}}]'
    ids = [marker, *b" ", *calls.encode(), END]
    engine = ScriptedEngine(lambda prompt: ids, tokenizer=tokenizer)
    with official(engine) as client:
        last, _ = streamed(client, tools=TOOLS, tool_choice=choice)
    assert last.finish_reason == "tool_calls"
    assert [c.function.arguments for c in last.message.tool_calls or []] == [ROME, TEXT]
    assert all(len(c.id) == 9 for c in last.message.tool_calls or [])
