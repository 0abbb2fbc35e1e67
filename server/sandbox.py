"""A jinja2 environment for templates from strangers: immutable sandbox, with limits.

Owns: what a template may call, how long it may run, how large a value it may build. Must not know:
messages, tokens, HTTP. Used by chat.py once per model (compile) and once per request (render).

jinja2's sandbox stops access to Python's inside; it does not stop `"x" * 10**12` or an endless
loop. Here every loop turn, macro call and intercepted operation asks the render's own Budget.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..runtime.errors import MartletError

MAX_SOURCE_CHARS = 1 << 20
MAX_VALUE_ITEMS = 1 << 24
MAX_WIDTH = 10_000
# A name no template can write, so that none can replace its own budget.
BUDGET_KEY = "martlet budget"


class ChatTemplateError(MartletError):
    """The model's chat template is not usable."""


class LimitReached(TemplateError):
    """The template runs too long or builds too much."""


class Refusal(TemplateError):
    """The template itself refused the messages, by raise_exception."""


class Budget:
    """The time one rendering may take."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise LimitReached(f"the chat template ran longer than {self.limit_s:g} s")


class Generation(Extension):
    """{% generation %} … {% endgeneration %} marks training targets: here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Ticks(NodeTransformer):
    """Puts a budget check into each loop and macro, and a size check around each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List([self.visit(part) for part in node.nodes])
        return nodes.Call(nodes.EnvironmentAttribute("join_parts"), [parts], [], None, None)

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick")
        call = nodes.Call(tick, [nodes.ContextReference()], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates expect (as transformers sets it up), with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=False,
            # Folding constants would run the template's arithmetic at load, outside any budget.
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.concat = self.join_parts  # type: ignore[method-assign]
        self.filters = dict(_FILTERS)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Ticks().visit(tree)
        tree.set_environment(self)
        return tree

    @staticmethod
    def tick(context: Context) -> None:
        context.parent[BUDGET_KEY].check()

    @staticmethod
    def join_parts(parts: Iterable[Any]) -> str:
        texts, n_chars = [], 0
        for part in parts:
            texts.append(str(part))
            n_chars += len(texts[-1])
            _check_size(n_chars)
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str):
            __obj = _checked(__obj, first=0)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick(context)
        _BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(str(value.__self__))
        return wrapped


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter would also escape for HTML, which models never saw."""
    # Escaping is left out even when asked: the marks around content must come through unchanged.
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text: str = value if isinstance(value, str) else str(value)
    return text.replace(old, new, -1 if count is None else count)


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    _check_widths(form)
    return datetime.now().strftime(form)


def _checked_filter(run: Callable[..., Any]) -> Callable[..., Any]:
    # The filtered value is no width; some filters get the context or environment before it.
    return _checked(run, first=2 if hasattr(run, "jinja_pass_arg") else 1)


def _checked(run: Callable[..., Any], first: int) -> Callable[..., Any]:
    """`run` with small numbers only (widths, repeats) and a result that is not too large."""

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[first:], *kwargs.values()):
            if isinstance(arg, int) and arg > MAX_WIDTH:
                raise LimitReached(f"the chat template asks for a width above {MAX_WIDTH}")
        result = run(*args, **kwargs)
        if isinstance(result, str | list):
            _check_size(len(result))
        return result

    return checked


def _check_size(n_items: int) -> None:
    if n_items > MAX_VALUE_ITEMS:
        raise LimitReached(f"the chat template builds a value of more than {MAX_VALUE_ITEMS} items")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_sum(left: Any, right: Any) -> None:
    _check_size(_size(left) + _size(right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length())
    elif isinstance(right, int):
        _check_size(_size(left) * max(right, 0))
    elif isinstance(left, int):
        _check_size(_size(right) * max(left, 0))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * max(right, 0))


def _check_modulo(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_widths(left)


def _check_widths(form: str) -> None:
    """A format string may ask for a width of its own: at most four digits, none from outside."""
    if re.search(r"\d{5}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{", form):
        raise LimitReached("the chat template uses a format with a very large or variable width")


_FILTERS = {
    name: _checked_filter(run)
    for name, run in {**DEFAULT_FILTERS, "tojson": tojson, "replace": _replace}.items()
}
_BINOP_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_modulo,
}
