"""Constrained output through the engine: whatever the model wants, the grammar holds."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.runtime import grammar
from martlet.runtime.constraint import flags_of, is_allowed
from martlet.runtime.engine import Engine
from martlet.runtime.errors import RequestError
from martlet.runtime.grammar import Grammar, Grammars
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.tokenizer import Tokenizer

from .harness import Answer, engine_of, run_all
from .scripted import EOS, ScriptedTokenizer, hashed_logits, reply_text
from .vocabularies import spm

PROMPT = [5, 6, 7]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ScriptedTokenizer())


def compiled(grammars: Grammars, schema: Any) -> Grammar:
    return grammars.compile(grammar.json_grammar(schema), field="f")


def ask(engine: Engine, rules: Grammar, **params: Any) -> Answer:
    answer = Answer()
    engine.submit(PROMPT, SamplingParams(**params), answer, constraint=rules.start())
    return answer


def accepts(rules: Grammar, text: str) -> bool:
    """Whether the text is a whole answer: as a model would write it, byte by byte."""
    constraint = rules.start()
    for byte in text.encode():
        if not is_allowed(constraint.allowed(), byte):
            return False
        constraint.accept(byte)
    return is_allowed(constraint.allowed(), EOS)


def test_any_model_answers_by_the_schema(grammars: Grammars) -> None:
    engine, _ = engine_of(hashed_logits(), context=600)
    rules = compiled(grammars, PERSON)
    answers = [ask(engine, rules, seed=seed, temperature=2.0) for seed in range(12)]
    free = Answer()
    engine.submit(PROMPT, SamplingParams(seed=1, max_tokens=40), free)
    run_all(engine)
    for answer in answers:
        assert answer.finish.reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in answers}) > 6
    with pytest.raises(ValueError, match=r"."):
        json.loads(free.text)  # the model itself says nothing of the kind
    stats = engine.stats()
    assert stats.masks == sum(len(answer.ids) for answer in answers)
    assert stats.mask_seconds > 0


def test_neighbours_and_steps_change_nothing(grammars: Grammars) -> None:
    rules = compiled(grammars, PERSON)
    alone = []
    for seed in range(4):
        engine, _ = engine_of(hashed_logits(), context=600)
        alone.append(ask(engine, rules, seed=seed))
        run_all(engine)
    engine, _ = engine_of(hashed_logits(), context=600, executor={"max_rows": 5})
    together = [ask(engine, rules, seed=seed) for seed in range(4)]
    others = [Answer() for _ in range(3)]
    for seed, other in enumerate(others):
        engine.submit([9, seed], SamplingParams(seed=seed, max_tokens=50), other)
    run_all(engine)
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


def test_preemption_keeps_the_place_in_the_grammar(grammars: Grammars) -> None:
    rules = compiled(grammars, PERSON)
    wide, _ = engine_of(hashed_logits(), context=300)
    expected = [ask(wide, rules, seed=seed) for seed in range(6)]
    run_all(wide)
    pool = {"n_blocks": 24, "block_tokens": 4}
    narrow, _ = engine_of(hashed_logits(), context=96, executor=pool)
    answers = [ask(narrow, rules, seed=seed) for seed in range(6)]
    run_all(narrow)
    assert narrow.stats().preemptions > 0
    assert [a.ids[:80] for a in answers] == [a.ids[:80] for a in expected]


def test_an_end_only_where_the_grammar_allows(grammars: Grammars) -> None:
    engine, _ = engine_of(lambda history: EOS, context=64)  # a model that wants to end at once
    rules = grammars.compile(grammar.regex_grammar("a{3,5}"), field="f")
    answer = ask(engine, rules, temperature=0.0)
    run_all(engine)
    assert answer.text == "aaa"
    assert answer.ids[-1] == EOS


def test_nothing_may_follow_so_nothing_is_computed(grammars: Grammars) -> None:
    """A model that would never end is not asked once more."""
    engine, executor = engine_of(reply_text("a" * 60), context=64)
    answer = ask(engine, grammars.compile(grammar.regex_grammar("a{3}"), field="f"))
    run_all(engine)
    assert (answer.text, answer.finish.reason, answer.finish.n_output) == ("aaa", "stop", 3)
    assert len(executor.steps) == 3


def test_a_cut_answer_says_so(grammars: Grammars) -> None:
    engine, _ = engine_of(hashed_logits(), context=600)
    answer = ask(engine, compiled(grammars, PERSON), seed=1, max_tokens=5)
    run_all(engine)
    assert answer.finish.reason == "length"


def test_ignore_eos_is_refused(grammars: Grammars) -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestError, match="ignore_eos"):
        ask(engine, compiled(grammars, PERSON), ignore_eos=True)


def test_a_constraint_that_fails_ends_its_request_and_no_other(grammars: Grammars) -> None:
    engine, _ = engine_of(hashed_logits(), context=600)
    rules = compiled(grammars, PERSON)
    broken, sound = rules.start(), ask(engine, rules, seed=3)
    answer = Answer()
    engine.submit(PROMPT, SamplingParams(), answer, constraint=broken)
    broken._matcher.consume_token(EOS)  # not allowed yet: the library is in its error state
    run_all(engine)
    assert answer.finish.reason == "error"
    assert "grammar" in (answer.finish.error or "")
    assert answer.ids == []
    assert sound.finish.reason == "stop"


# ---- schemas (B66, B68, B70) -----------------------------------------------------------------


TREE = {"$ref": "#/$defs/node"}
NODE = {
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/kind"}, "sub": {"type": "array", "items": TREE}},
    "required": ["v"],
    "additionalProperties": False,
}
KIND = {"enum": ["x", "y"]}


def test_b68_references_mean_what_they_stand_for(grammars: Grammars) -> None:
    orders = [{"node": NODE, "kind": KIND}, {"kind": KIND, "node": NODE}]
    rules = [compiled(grammars, {**TREE, "$defs": defs}) for defs in orders]
    inline = compiled(grammars, {"type": "object", "properties": {"v": KIND}})
    behind = compiled(
        grammars,
        {"type": "object", "properties": {"v": {"$ref": "#/$defs/kind"}}, "$defs": {"kind": KIND}},
    )
    cases = {
        '{"v": "x"}': True,
        '{"v": "z"}': False,
        '{"v": "y", "sub": [{"v": "x", "sub": []}, {"v": "y"}]}': True,
        '{"v": "y", "sub": [{"sub": []}]}': False,
    }
    for text, is_good in cases.items():
        assert [accepts(r, text) for r in rules] == [is_good] * 2, text
        if "sub" not in text:
            assert accepts(inline, text) == accepts(behind, text) == is_good
    with pytest.raises(RequestError, match="gone"):
        compiled(grammars, {"$ref": "#/$defs/gone"})
    with pytest.raises(RequestError, match=r"example\.com"):
        compiled(grammars, {"$ref": "http://example.com/schema"})


def test_b70_additional_properties(grammars: Grammars) -> None:
    def rules(extra: dict[str, Any]) -> Grammar:
        return compiled(
            grammars, {"type": "object", "properties": {"a": {"type": "integer"}}, **extra}
        )

    number, text = '{"a": 1, "b": 2}', '{"a": 1, "b": "c"}'
    for extra, expected in (
        ({"additionalProperties": False}, (False, False)),
        ({"additionalProperties": True}, (True, True)),
        ({"additionalProperties": {"type": "string"}}, (False, True)),
        ({}, (True, True)),
    ):
        assert (accepts(rules(extra), number), accepts(rules(extra), text)) == expected, extra


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"not": {"type": "string"}}}, "not"),
        ({"type": "string", "pattern": "(["}, "unclosed character class"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "foo"}, "foo"),
        ({"type": "string", "format": "wat"}, "wat"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "not"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"items": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "uniqueItems"),
    ],
)
def test_b66_b70_what_cannot_be_kept_is_refused_by_name(
    grammars: Grammars, schema: Any, named: str
) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        compiled(grammars, schema)
    assert caught.value.field == "f"
    assert len(str(caught.value)) < 400


def test_b70_multiples_are_kept(grammars: Grammars) -> None:
    rules = compiled(grammars, {"type": "integer", "multipleOf": 7})
    assert [n for n in range(30) if accepts(rules, str(n))] == [0, 7, 14, 21, 28]


def test_space_between_tokens_is_bounded(grammars: Grammars) -> None:
    rules = compiled(grammars, PERSON)
    good = {"name": "n", "age": 1, "tags": ["a"]}
    for indent in (None, 2, 8):
        assert accepts(rules, json.dumps(good, indent=indent))
    assert not accepts(rules, json.dumps(good, indent=50))
    assert not accepts(rules, " " + json.dumps(good))


@given(st.text(max_size=6), st.integers(-5, 300), st.lists(st.sampled_from("abc"), max_size=4))
@settings(max_examples=60, deadline=None)
def test_accepts_what_another_validator_accepts(name: str, age: int, tags: list[str]) -> None:
    rules = compiled(_SHARED, PERSON)
    value = {"name": name, "age": age, "tags": tags}
    is_good = jsonschema.Draft202012Validator(PERSON).is_valid(value)
    # Control characters have two spellings; one of them is enough.
    if name.isprintable():
        assert accepts(rules, json.dumps(value, ensure_ascii=False)) == is_good


_SHARED = Grammars(ScriptedTokenizer())


# ---- other grammars ------------------------------------------------------------------------------


def test_regular_expressions_with_every_delimiter(grammars: Grammars) -> None:
    for pattern, good, bad in (
        (r"a/b\d{2}", "a/b42", "a/b4x"),
        ('say "[a-z]+"\n', 'say "hi"\n', "say hi\n"),
        (r"[/]\/\\", "//\\", "//"),
    ):
        rules = grammars.compile(grammar.regex_grammar(pattern), field="f")
        assert re.fullmatch(pattern, good)
        assert accepts(rules, good)
        assert not accepts(rules, bad)


def test_choices(grammars: Grammars) -> None:
    choices = ["yes", 'a "quoted" \\ one', "zwei\nZeilen", "日本\u2028"]
    rules = grammars.compile(grammar.choice_grammar(choices), field="f")
    for choice in choices:
        assert accepts(rules, choice)
    assert not accepts(rules, "no")


def test_both_grammar_languages(grammars: Grammars) -> None:
    gbnf = 'root ::= "a" item+\nitem ::= [0-9] | "b"'
    lark = 'start: "a" item+\nitem: /[0-9]/ | "b"'
    for text in (gbnf, lark):
        rules = grammars.compile(grammars.lark(text, field="f"), field="f")
        assert accepts(rules, "a1b2")
        assert not accepts(rules, "1")


@pytest.mark.parametrize(
    "text",
    ['root ::= "a" (', 'root ::= "a" gone', "start: gone", "start: /([/", "", "start: start"],
)
def test_b66_broken_grammars(grammars: Grammars, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(grammars.lark(text, field="f"), field="f")
    assert caught.value.field == "f"
    assert "\n" not in str(caught.value)


def test_a_grammar_may_be_too_large(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="at most"):
        grammars.compile(grammar.choice_grammar(["a" * 300_000]), field="f")


def test_what_breaks_behind_the_first_token_is_refused() -> None:
    choices = [f"v{i}" for i in range(5_000)]  # more of them begin alike than the library follows
    with pytest.raises(RequestError, match=r"^f: .*5001 items; max is 2000"):
        Grammars(ScriptedTokenizer()).compile(grammar.choice_grammar(choices), field="f")
    assert Grammars(ScriptedTokenizer()).compile(grammar.choice_grammar(choices[:500]), field="f")


def test_what_costs_too_much_per_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^f: too large: each token takes \d+ ms"):
        Grammars(ScriptedTokenizer(), max_mask_s=0.0).compile("start: /a+/", field="f")


def test_a_grammar_is_compiled_once_and_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(ScriptedTokenizer())
    first = grammars.compile("start: /a+/", field="f")
    assert grammars.compile("start: /a+/", field="g") is first
    monkeypatch.setattr(grammar, "MAX_KEPT", 2)
    for text in ("start: /b+/", "start: /a+/", "start: /c+/"):  # a was used after b
        grammars.compile(text, field="f")
    assert grammars.compile("start: /a+/", field="f") is first
    monkeypatch.setattr(grammar, "MAX_KEPT_CHARS", 20)
    grammars.compile("start: /d+/", field="f")
    assert grammars.compile("start: /a+/", field="f") is not first


def test_answers_of_one_grammar_go_their_own_ways() -> None:
    rules = Grammars(ScriptedTokenizer()).compile("start: /a{1,4000}/", field="f")
    first, second = rules.start(), rules.start()
    for _ in range(200):
        first.accept(ord("a"))
    assert is_allowed(second.allowed(), ord("a"))
    assert not is_allowed(second.allowed(), EOS)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"martlet\[structured\]"):
        compiled(Grammars(ScriptedTokenizer()), PERSON)


# ---- vocabularies --------------------------------------------------------------------------------


class Counting(ScriptedTokenizer):
    n_asked = 0

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        self.n_asked += 1
        return super().token_bytes(token_id, special=special)


def test_the_vocabulary_is_laid_out_once_and_late() -> None:
    tokenizer = Counting()
    grammars = Grammars(tokenizer)
    assert tokenizer.n_asked == 0
    threads = [threading.Thread(target=compiled, args=(grammars, PERSON)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.n_asked == tokenizer.vocab_size


def test_a_vocabulary_that_puts_a_space_before_each_text() -> None:
    """What a grammar leaves no choice about is written in tokens of exactly these bytes."""
    tokenizer = Tokenizer.from_metadata(spm())
    assert tokenizer.decode(tokenizer.encode("a", add_special=False, parse_special=False)) == "a"
    rules = Grammars(tokenizer).compile(grammar.choice_grammar(["abcabc", "abx"]), field="f")
    constraint, raw = rules.start(), b""
    while not constraint.is_done:
        token_id = int(flags_of(constraint.allowed(), tokenizer.vocab_size).nonzero()[0][-1])
        constraint.accept(token_id)
        raw += tokenizer.token_bytes(token_id)
    assert raw in (b"abcabc", b"abx")
