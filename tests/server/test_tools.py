"""Tools over a real socket: calls that the model writes by itself, by the official client."""

from __future__ import annotations

from typing import Any

import pytest
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER

from .scripted_engine import CHATML, END, SPECIALS, VOCAB_SIZE, ScriptedEngine
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
        chunks = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=n, stream=True
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[-1].finish_reason == "length"
        pieces = [call for c in choices for call in c.delta.tool_calls or ()]
        for index, arguments in enumerate((ROME, '{"te')):
            of_call = [call for call in pieces if call.index == index]
            assert [call.type for call in of_call if call.type] == ["function"], "once"
            assert "".join(c.function.arguments or "" for c in of_call if c.function) == arguments


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


def marked_tokenizer(template: str, *markers: str) -> Tokenizer:
    """One whose markers are control tokens, from FIRST_MARKER on."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    specials = [*SPECIALS, *markers]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [letters[byte] for byte in range(256)] + specials,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 2] + [3] * len(markers),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": template,
    }
    return Tokenizer.from_metadata(metadata)


FIRST_MARKER = VOCAB_SIZE


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_mistral_marks_calls_by_a_control_token(choice: str) -> None:
    tokenizer = marked_tokenizer(MISTRAL, "[TOOL_CALLS]")
    calls = f'[{{"name": "weather", "arguments": {ROME}}}, {{"name": "note", "arguments": {TEXT}}}]'
    ids = [FIRST_MARKER, *b" ", *calls.encode(), END]
    engine = ScriptedEngine(lambda prompt: ids, tokenizer=tokenizer)
    with official(engine) as client:
        last, _ = streamed(client, tools=TOOLS, tool_choice=choice)
    assert last.finish_reason == "tool_calls"
    assert [c.function.arguments for c in last.message.tool_calls or []] == [ROME, TEXT]
    assert all(len(c.id) == 9 for c in last.message.tool_calls or [])


# As Granite 3's and Phi-4-mini's templates have it, in short.
GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools{{ tools | tojson }}{% endif %}"
    "{# <|tool_call|> #}" + CHATML
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if 'tools' in m %}<|tool|>{{ m.tools }}<|/tool|>{# message['tools'] #}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLED = f'{{"name": "weather", "arguments": {ROME}}}'


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("template", "closes"), [(GRANITE, False), (PHI, True)])
def test_granite_and_phi_write_lists_behind_a_control_token(
    template: str, closes: bool, choice: str
) -> None:
    tokenizer = marked_tokenizer(template, "<|tool_call|>", "<|/tool_call|>")
    calls = f'[{CALLED}, {{"name": "note", "arguments": {TEXT}}}]'
    ids = [FIRST_MARKER, *calls.encode(), *([FIRST_MARKER + 1] if closes else []), END]
    engine = ScriptedEngine(lambda prompt: ids, tokenizer=tokenizer)
    with official(engine) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice
        )
        last, _ = streamed(client, tools=TOOLS, tool_choice=choice)
    for found in (last, whole.choices[0]):
        assert found.finish_reason == "tool_calls"
        assert [c.function.arguments for c in found.message.tool_calls or []] == [ROME, TEXT]
        assert not found.message.content
