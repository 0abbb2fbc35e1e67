"""Reasoning apart from the answer (B56), and what switches it on and off."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.server.reasoning import Splitter

from .scripted_engine import OPENED, THINKING, ScriptedEngine, byte_tokenizer, says
from .serving import assert_refused, chat_body, serving

PATH = "/v1/chat/completions"


def split(pieces: list[str], *, begins_inside: bool = False) -> tuple[str, str]:
    splitter = Splitter(begins_inside)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    return (
        "".join(text for is_reasoning, text in parts if is_reasoning),
        "".join(text for is_reasoning, text in parts if not is_reasoning),
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>ab</think>c", "ab", "c"),
        ("<think>\na b\n</think>\n\nc\n", "a b", "c\n"),
        (" \n<think>a</think>", "a", ""),
        ("<think>never closed ", "never closed ", ""),
        ("<think>", "", ""),
        ("<think></think>c", "", "c"),
        ("no tags", "", "no tags"),
        (" c <think>a</think>", "", " c <think>a</think>"),
        ("<thin", "", "<thin"),
        ("<think>a</thin k></think>c", "a</thin k>", "c"),
        ("<think>a</think>b</think>", "a", "b</think>"),
        ("  ", "", "  "),
    ],
)
def test_b56_each_character_in_one_field_however_it_is_cut(
    text: str, reasoning: str, content: str
) -> None:
    assert split([text]) == (reasoning, content)
    assert split(list(text)) == (reasoning, content)
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]]) == (reasoning, content)


def test_b56_as_reported() -> None:
    assert split(["<th", "ink>a", "b</thi", "nk>c"]) == ("ab", "c")


@pytest.mark.parametrize("text", ["a</think>c", "\na\n</think>\nc", "<think>a</think>c"])
def test_reasoning_that_the_prompt_has_opened(text: str) -> None:
    assert split(list(text), begins_inside=True) == ("a", "c")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "k>", "a", " ", "\n", "</thi"])))
def test_cutting_changes_nothing(pieces: list[str]) -> None:
    for begins_inside in (False, True):
        whole = split(["".join(pieces)], begins_inside=begins_inside)
        assert split(list("".join(pieces)), begins_inside=begins_inside) == whole


def test_text_is_held_back_only_where_a_tag_may_come() -> None:
    splitter = Splitter(True)
    assert splitter.push("so ") == [(True, "so")]
    assert splitter.push("far") == [(True, " far")]
    assert splitter.push("</") == []


def thinking_engine(text: str, template: str = THINKING) -> ScriptedEngine:
    return ScriptedEngine(says(text), tokenizer=byte_tokenizer(template))


def test_official_client_sees_both_fields_streamed_as_whole() -> None:
    with serving(thinking_engine("<think>\nhm, é\n</think>\n\nyes")) as client:
        official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = official.chat.completions.create(model="tiny", messages=messages)
        message: Any = whole.choices[0].message
        assert (message.reasoning_content, message.reasoning) == ("hm, é", "hm, é")
        assert message.content == "yes"
        assert whole.usage
        assert whole.usage.completion_tokens_details
        n_answer = len("yes") + 1 + len("\n\n")
        n_output = whole.usage.completion_tokens
        assert whole.usage.completion_tokens_details.reasoning_tokens == n_output - n_answer - 6
        stream = official.chat.completions.create(model="tiny", messages=messages, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thoughts) == "hm, é"
        assert [getattr(d, "reasoning", None) or "" for d in deltas] == thoughts
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        kinds = [bool(t) for t, d in zip(thoughts, deltas, strict=True) if t or d.content]
        assert all(first >= second for first, second in pairwise(kinds))


def test_stop_in_the_reasoning_ends_it_all() -> None:
    with serving(thinking_engine("<think>a STOP b</think>c")) as client:
        choice = client.post(PATH, json=chat_body(stop="STOP")).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "a "
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_opened_by_the_prompt_over_http() -> None:
    with serving(thinking_engine("a\n</think>c", OPENED)) as client:
        message = client.post(PATH, json=chat_body()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "c")


def test_no_split_where_it_is_not_wanted_or_the_template_shows_none() -> None:
    text = "<think>a</think>c"
    with serving(thinking_engine(text)) as client:
        message = client.post(PATH, json=chat_body(reasoning_format="none")).json()["choices"][0][
            "message"
        ]
        assert message == {"role": "assistant", "content": text}
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.json()["choices"][0]["text"] == text
    with serving(ScriptedEngine(says(text))) as client:
        message = client.post(PATH, json=chat_body()).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text}


CLOSED = "<think>\n\n</think>\n\n"


def test_effort_reaches_the_template() -> None:
    engine = thinking_engine("c")
    with serving(engine) as client:
        for fields, is_off in (
            ({}, False),
            ({"reasoning_effort": "none"}, True),
            ({"reasoning_effort": "high"}, False),
            ({"chat_template_kwargs": {"enable_thinking": False}}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, False),
        ):
            assert client.post(PATH, json=chat_body(**fields)).status_code == 200
            prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
            assert prompt.endswith(CLOSED) == is_off
        bad = client.post(PATH, json=chat_body(chat_template_kwargs={"enable_tools": 1}))
        assert assert_refused(bad)["param"] == "chat_template_kwargs.enable_tools"


def test_effort_a_model_cannot_make_is_refused_by_name() -> None:
    with serving(ScriptedEngine()) as client:
        assert client.post(PATH, json=chat_body(reasoning_effort="none")).status_code == 200
        error = assert_refused(client.post(PATH, json=chat_body(reasoning_effort="low")))
        assert error["param"] == "reasoning_effort"
    with serving(thinking_engine("a</think>c", OPENED)) as client:
        error = assert_refused(client.post(PATH, json=chat_body(reasoning_effort="none")))
        assert "cannot be turned off" in error["message"]


def test_the_last_message_is_continued() -> None:
    engine = ScriptedEngine(says("lo"))
    asked = {"role": "user", "content": "hi"}
    with serving(engine) as client:
        body = {"messages": [asked, {"role": "assistant", "content": "hel"}]}
        answer = client.post(PATH, json={**body, "continue_final_message": True})
        assert answer.json()["choices"][0]["message"]["content"] == "lo"
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids, special=True)
        assert prompt.endswith("<|im_start|>assistant\nhel")
        for last in (asked, {"role": "assistant", "content": ""}):
            body = {"messages": [asked, last], "continue_final_message": True}
            error = assert_refused(client.post(PATH, json=body))
            assert error["param"] == "continue_final_message"
