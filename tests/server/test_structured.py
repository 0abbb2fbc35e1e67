"""Answers of a given form over a real socket: the official client, schemas, other grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from martlet.runtime.grammar import Grammars

from .babbling import babbling
from .scripted_engine import CHATML, OPENED, THINKING, ScriptedEngine, byte_tokenizer, says
from .serving import assert_refused, chat_body, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with babbling(None) as client:
        yield client


@pytest.fixture(scope="module")
def official(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)


class Step(pydantic.BaseModel):
    kind: Literal["walk", "wait"]
    minutes: int = pydantic.Field(ge=0, le=90)


class Plan(pydantic.BaseModel):
    title: str = pydantic.Field(max_length=12)
    steps: list[Step] = pydantic.Field(max_length=3)
    note: str | None = pydantic.Field(max_length=6)


ASKED: Any = [{"role": "user", "content": "hi"}]


def schema_of(text: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": text, "strict": True}}


def text_of(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_parse_of_the_official_client(official: openai.OpenAI) -> None:
    answer = official.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Plan, n=3, seed=5
    )
    plans = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(plan, Plan) for plan in plans)
    assert len({plan.title for plan in plans if plan}) == 3
    again = official.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Plan, seed=6
    )
    assert again.choices[0].message.content == answer.choices[1].message.content


def test_stream_of_the_official_client(official: openai.OpenAI) -> None:
    with official.chat.completions.stream(
        model="tiny", messages=ASKED, response_format=Plan, seed=5
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    whole = official.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Plan, seed=5
    )
    assert isinstance(streamed.message.parsed, Plan)
    assert streamed.message.content == whole.choices[0].message.content
    assert streamed.finish_reason == "stop"


def test_json_objects(client: httpx.Client) -> None:
    for seed in range(3):
        text = text_of(client, response_format={"type": "json_object"}, seed=seed, max_tokens=600)
        assert text.startswith("{")
    assert text_of(client, response_format={"type": "text"}, max_tokens=5, seed=1)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"type": "integer", "minimum": 0, "maximum": 20}}, r"\d+"),
        ({"guided_grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"grammar": 'root ::= "x" [0-9] "y"?'}, r"x\dy?"),
        ({"json_schema": {"enum": [1, 2]}}, "1|2"),
        ({"structured_outputs": {"regex": "a{2}b"}}, "aab"),
        ({"structured_outputs": {"choice": ["u", "v"]}}, "u|v"),
        ({"structured_outputs": {"json": {"const": [1]}}}, r"\[\s*1\s*\]"),
        ({"response_format": {"type": "json_schema", "schema": {"const": "c"}}}, '"c"'),
        ({"response_format": {"type": "json_object", "schema": {"const": {}}}}, r"\{\s*\}"),
    ],
)
def test_the_fields_of_other_servers(
    client: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        assert re.fullmatch(pattern, text_of(client, seed=seed, **fields))
    body = {"prompt": "a", "n": 2, "best_of": 3, **fields}
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert all(re.fullmatch(pattern, choice["text"]) for choice in choices)


def test_empty_wishes_are_none(client: httpx.Client) -> None:
    assert text_of(client, grammar="", json_schema={}, max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        (
            {"response_format": schema_of({"type": "array", "uniqueItems": True})},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        (
            {"response_format": schema_of({"type": "string", "pattern": "(["})},
            "response_format.json_schema.schema",
            "unclosed character class",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs one"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", ""),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "takes no"),
        ({"response_format": schema_of([])}, "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": "json"}, "response_format", ""),
        ({"guided_regex": "(["}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"guided_grammar": "start: gone"}, "guided_grammar", "gone"),
        ({"grammar": 'root ::= "a" ('}, "grammar", ""),
        ({"grammar": 'root ::= "a" gone'}, "grammar", "gone"),  # B66
        ({"json_schema": {"$ref": "#/$defs/gone"}}, "json_schema", "gone"),  # B68
        ({"grammar": "start: start"}, "grammar", "failed"),
        ({"json_schema": {"type": "foo"}}, "json_schema", "foo"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar", "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", ""),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "llguidance"),
    ],
)
def test_b66_b70_refusals_name_the_field(
    client: httpx.Client, fields: dict[str, Any], param: str, named: str
) -> None:
    error = assert_refused(client.post(CHAT, json=chat_body(**fields)))
    assert error["param"] == param
    assert named in error["message"]


def test_an_answer_that_is_continued_has_no_form(client: httpx.Client) -> None:
    body = chat_body(continue_final_message=True, guided_regex="a")
    body["messages"].append({"role": "assistant", "content": "{"})
    error = assert_refused(client.post(CHAT, json=body))
    assert error["param"] == "continue_final_message"


def test_a_cut_answer_is_of_finish_reason_length(client: httpx.Client) -> None:
    body = chat_body(response_format=schema_of({"type": "string", "minLength": 9}), max_tokens=4)
    assert client.post(CHAT, json=body).json()["choices"][0]["finish_reason"] == "length"


# ---- with reasoning ------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_reasoning_comes_first_and_is_free(template: str) -> None:
    opening = "<think>" if template == THINKING else ""
    script = says(f'{opening}hm {{ "no\n</think>\n\n[1, 2]')
    fields = {"guided_json": {"type": "array", "items": {"type": "integer"}}}
    with serving(ScriptedEngine(script, tokenizer=byte_tokenizer(template))) as client:
        message = client.post(CHAT, json=chat_body(**fields)).json()["choices"][0]["message"]
        assert message["content"] == "[1, 2]"
        assert message["reasoning_content"] == 'hm { "no'
        # Unsplit, all of the text is the answer: then there is no room for reasoning.
        unsplit = client.post(CHAT, json=chat_body(reasoning_format="none", **fields))
        assert unsplit.status_code == 500


def test_a_thinking_model_may_answer_at_once() -> None:
    with babbling() as client:
        for seed in range(4):
            body = chat_body(guided_json={"enum": ["red", "blue"]}, seed=seed, max_tokens=400)
            choice = client.post(CHAT, json=body).json()["choices"][0]
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["message"]["content"]) in ("red", "blue")


def test_masks_are_measured(client: httpx.Client) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert found
        return float(found[1])

    before = value("martlet_grammar_masks_total")
    assert len(text_of(client, guided_regex="[0-9]{7}")) == 7
    assert value("martlet_grammar_masks_total") == before + 7
    assert value("martlet_grammar_mask_seconds_total") > 0


LARGE = "x{1000000}"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"guided_regex": LARGE}, "guided_regex", "{1000000} repeats make it 1,000,000"),
        (
            {"guided_json": {"items": {"type": "string", "pattern": LARGE}}},
            "guided_json",
            "{1000000} repeats",
        ),
        ({"grammar": f"start: /{LARGE}/"}, "grammar", "too many expressions"),
        (
            {"grammar": "start: " + " | ".join(f'"v{i}"' for i in range(5000))},
            "grammar",
            "items; max is",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"pattern": LARGE}}},
                        },
                    }
                ]
            },
            "tools[0].function.parameters",
            "{1000000} repeats",
        ),
    ],
)
def test_what_is_too_large_is_refused_before_it_runs(
    fields: dict[str, Any], param: str, named: str, thinks: bool
) -> None:
    engine = ScriptedEngine(tokenizer=byte_tokenizer(THINKING if thinks else CHATML))
    with serving(engine) as client:
        error = assert_refused(client.post(CHAT, json=chat_body(**fields)))
    assert error["param"] == param
    assert named in error["message"]
    assert not engine.requests


def test_one_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_compiled = 0
    compile_one = Grammars._compile

    def counting(self: Grammars, grammar: str, field: str) -> Any:
        nonlocal n_compiled
        n_compiled += 1
        return compile_one(self, grammar, field)

    monkeypatch.setattr(Grammars, "_compile", counting)
    with serving(ScriptedEngine(says('{"a":true}'))) as client:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
        texts = {text_of(client, response_format=schema_of(schema)) for _ in range(3)}
    assert texts == {'{"a":true}'}
    assert n_compiled == 1
