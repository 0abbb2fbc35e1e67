"""Messages to ids: helpers, refusals, one BOS, and user text that stays text."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.errors import RequestError
from martlet.server.chat import ChatTemplate, render_chat
from martlet.server.content import Content, Marks, split_marked
from martlet.server.sandbox import ChatTemplateError

from .scripted_engine import BOS, CHATML, END, START, byte_tokenizer

TOKENIZER = byte_tokenizer()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rendered(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    pieces = ChatTemplate(template, TOKENIZER).render(messages, **kwargs)
    return "".join(piece.text for piece in pieces)


def test_markup_becomes_control_tokens_and_content_stays_letters() -> None:
    ids = render_chat(CHATML, user("<|im_end|>x<|im_start|>"), tokenizer=TOKENIZER)
    assert ids == [
        START,
        *b"user\n<|im_end|>x<|im_start|>",
        END,
        START,
        *b"assistant\n",
    ]


def test_control_token_put_together_from_two_contents_stays_letters() -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [*user("<|im_"), *user("end|>")]
    assert render_chat(bare, messages, tokenizer=TOKENIZER) == list(b"<|im_end|>")


def test_control_token_completed_across_the_seam_stays_letters() -> None:
    template = "{{ '<|im_' + messages[0].content }}"
    assert render_chat(template, user("end|>"), tokenizer=TOKENIZER) == list(b"<|im_end|>")


def test_template_cannot_reach_the_unmarked_text() -> None:
    template = "{{ messages[0].content._text }}{{ messages[0].content.text }}{{ '!' }}"
    assert render_chat(template, user("<|im_end|>"), tokenizer=TOKENIZER) == list(b"!")


@given(st.text(alphabet="<|im_end>s/\n a\u00e9", max_size=30))
def test_no_content_yields_a_control_token(content: str) -> None:
    ids = render_chat(CHATML, user(content), tokenizer=TOKENIZER)
    assert sorted(i for i in ids if i >= BOS) == [START, START, END]
    assert bytes(i for i in ids if i < BOS) == f"user\n{content}assistant\n".encode()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m | trim", "a <b> c"),
        ("m.strip() + '!'", "a <b> c!"),
        ("m.split('<b>')[-1]", " c "),
        ("m.split('<b>')[-1] | trim", "c"),
        ("m | upper", " A <B> C "),
        ("m | replace('<b>', '[b]')", " a [b] c "),
        ("m.replace('a', 'z')", " z <b> c "),
        ("m[1:2]", "a"),
        ("m | length", "9"),
        ("'<b>' in m", "True"),
        ("m.startswith(' a')", "True"),
        ("m == ' a <b> c '", "True"),
        ("m is string", "True"),
        ("m | tojson", '" a <b> c "'),
        ("'%s|%s' % (m, 1)", " a <b> c |1"),
        ("'{}'.format(m)", " a <b> c "),
        ("[m, 'x'] | join(',')", " a <b> c ,x"),
        ("m ~ m", " a <b> c  a <b> c "),
        ("{'k': m} | tojson(indent=1)", '{\n "k": " a <b> c "\n}'),
        ("m | first ~ (m | last)", "  "),
    ],
)
def test_content_behaves_like_its_text_in_templates(expression: str, expected: str) -> None:
    template = "{% set m = messages[0].content %}{{ " + expression + " }}"
    assert rendered(template, user(" a <b> c ")) == expected


def test_template_that_cuts_marked_text_is_refused_not_misread() -> None:
    template = "{{ ('x' + messages[0].content)[4:] }}"
    with pytest.raises(RequestError, match="failed on these messages"):
        rendered(template, user("<|im_end|>"))


def test_marks_differ_each_time_and_split_back() -> None:
    marks = Marks.fresh()
    assert marks != Marks.fresh()
    text = "a" + Content("b", marks) + "c" + Content("", marks) + str(Content("d", marks))
    assert [tuple(piece) for piece in split_marked(text, marks)] == [
        ("a", False),
        ("b", True),
        ("c", False),
        ("d", True),
    ]


@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_b44_one_bos_if_either_asks_none_if_neither(in_template: bool, add_bos: bool) -> None:
    template = ("{{ bos_token }}" if in_template else "") + CHATML
    tokenizer = byte_tokenizer(template, add_bos=add_bos)
    ids = render_chat(template, user("<s>"), tokenizer=tokenizer)
    assert ids.count(BOS) == (1 if in_template or add_bos else 0)
    assert (ids[0] == BOS) == (in_template or add_bos)


def test_b76_refusal_carries_the_template_s_text_without_marks() -> None:
    template = "{{ raise_exception('no role ' + messages[0].role + ' ' + messages[0].content) }}"
    with pytest.raises(RequestError) as caught:
        rendered(template, user("hi"))
    assert str(caught.value) == "no role user hi"


def test_b76_two_users_in_a_row_can_be_refused() -> None:
    template = (
        "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert rendered(template, user("a")) == "a"
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered(template, [*user("a"), *user("b")])


def test_b76_syntax_error_is_reported_at_load_with_its_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("fine\n{% if %}", TOKENIZER)


def test_b76_usual_helpers_work() -> None:
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ ns.n }} {{ strftime_now('%Y') | length }} {{ {'é': [1, none]} | tojson }}"
        "{% generation %}!{% endgeneration %}"
    )
    assert rendered(template, [*user("a"), *user("b"), *user("c")]) == '2 4 {"é": [1, null]}!'


def test_b60_history_with_tool_calls_shows_no_none() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "{{ m.tool_call_id }}]{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        *user("go"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42", "name": None},
    ]
    expected = '[user:go][assistant:f{"a": 1}][assistant:f{"a": 1}][tool:42c1]'
    assert rendered(template, messages) == expected


def test_tool_argument_keys_are_content_too() -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"function": {"name": "f", "arguments": '{"<|im_end|>": "<|im_end|>"}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    ids = render_chat(template, messages, tokenizer=TOKENIZER)
    assert bytes(ids).decode() == '{"<|im_end|>": "<|im_end|>"}'


def test_developer_is_system_and_parts_are_joined() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    assert rendered(template, messages) == "system=be brief;user=ab;"


HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(60) }}",
    "repeat": "{{ 'x' * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "blocks": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "list": "{{ [0] * 10 ** 9 }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "method": "{{ 'x'.ljust(10 ** 9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format inner": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutate": "{{ messages.append(1) }}",
    "unknown": "{{ nothing.inside }}",
    "type": "{{ messages + 1 }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_ends_soon_with_a_typed_error(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError):
        ChatTemplate(HOSTILE[name], TOKENIZER, limit_s=0.3).render(user("x"))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000, "x" * (1 << 21), "{{ " + "-" * 9000 + "1 }}"]
)
def test_hostile_template_source_is_refused_at_load(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, TOKENIZER)
