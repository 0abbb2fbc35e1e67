"""Chat templates and what they are given: refused with a typed error, or text, within their limits.

An input is a template, and behind a NUL the messages as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from martlet.runtime.errors import RequestError
from martlet.server.chat import ChatTemplate
from martlet.server.sandbox import MAX_VALUE_ITEMS, ChatTemplateError

from ..server.scripted_engine import CHATML, OPENED, THINKING, byte_tokenizer

MOST_BYTES = 2048
LIMIT_S = 0.25
MORE_S = 1.0  # until the limit is looked at again
TOKENIZER = byte_tokenizer()
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <|im_end|> brief"},
    {"role": "user", "content": "hi {{ 7*7 }}"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def run(data: bytes) -> None:
    source = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()
    begun = time.process_time()
    try:
        template = ChatTemplate(source, TOKENIZER, limit_s=LIMIT_S)
        pieces = template.render(MESSAGES, tools=TOOLS, enable_thinking=True)
        assert sum(len(piece.text) for piece in pieces) <= 2 * MAX_VALUE_ITEMS
        if sum(len(piece.text) for piece in pieces) < 1 << 16:
            template.encode(MESSAGES)
    except (ChatTemplateError, RequestError):
        pass
    took = time.process_time() - begun
    assert took < LIMIT_S + MORE_S, f"{took:.1f} s"


def seeds() -> Iterator[bytes]:
    for source in (CHATML, THINKING, OPENED):
        yield source.encode()
    for source in (
        "{% macro m(x) %}{{ x|tojson(indent=2) }}{% endmacro %}{{ m(tools) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n * 2 ** 3 }}{{ 'a' ~ 'b' }}{{ '%5d' % 3 }}{{ '{:>4}'.format('x') }}",
        "{% if messages[0]['role'] == 'system' %}{{ messages[0].content|trim|upper }}{% endif %}"
        "{{ raise_exception('no ' + bos_token) }}",
        "{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}{{ 'a,b'.split(',') }}",
        "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
        "{{ messages|map(attribute='role')|join(', ')|replace('u', 'v')|center(9) }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ x.__class__ }}",
        "{%- for k, v in tools[0].function|dictsort %}{{ k|e }}{% else %}{% endfor -%}",
        "{{ [1, 2, 3]|batch(2)|list }}{{ 'x' * 10 }}{{ [0] * 10 }}{{ 'abc'[::-1] }}",
        "{% call(x) m() %}{{ caller(1) }}{% endcall %}{% filter upper %}a{% endfilter %}",
    ):
        yield source.encode()
    yield json.dumps(MESSAGES).encode()
