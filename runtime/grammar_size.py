"""How large a regular expression is, before anybody compiles it.

Owns: written_out. Must not know: grammars, what compiles them. An estimate by counting alone: what
is no regular expression is for its compiler to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
GROUP = re.compile(r"\((?:\?(?:P?<[^>]{0,64}>|[a-zA-Z-]{0,8}:))?")
CLASS_END = re.compile(r"\\.|\]", re.DOTALL)
LONGEST = 12
"""Digits of a number that is worth reading."""
MOST = 10**LONGEST
"""Where counting ends: repeats of repeats would make numbers as long as the pattern."""


class Size(NamedTuple):
    n: int
    """Atoms, with each bounded repeat written out as often as it may be repeated; at most MOST."""
    largest: str
    """The repeat that makes most of it, as it stands there; "" without one."""


def written_out(pattern: str) -> Size:
    groups: list[list[Size]] = [[]]
    at = 0
    while at < len(pattern):
        if repeat := REPEAT.match(pattern, at):
            if groups[-1]:
                groups[-1].append(_repeated(groups[-1].pop(), repeat))
            at = repeat.end()
            continue
        char, end = pattern[at], at + 1
        if group := GROUP.match(pattern, at):
            groups.append([])
            end = group.end()
        elif char == ")" and len(groups) > 1:
            inside = groups.pop()
            groups[-1].append(_sum(inside))
        elif char not in "|*+?^$)":
            groups[-1].append(Size(1, ""))
            end = at + 2 if char == "\\" else _class_end(pattern, at) if char == "[" else end
        at = end
    return _sum([size for group in groups for size in group])


def _class_end(pattern: str, at: int) -> int:
    """Behind the class that begins there; behind everything where it does not end."""
    begun = at + 2 if pattern.startswith("[^", at) else at + 1
    begun += pattern.startswith("]", begun)  # the first one is a member
    ends = (found.end() for found in CLASS_END.finditer(pattern, begun) if found[0] == "]")
    return next(ends, len(pattern))


def patterns_of(schema: Any) -> Iterator[str]:
    """Regular expressions of a JSON schema, wherever they stand."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            if isinstance(properties := value.get("patternProperties"), dict):
                yield from properties
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _repeated(one: Size, repeat: re.Match[str]) -> Size:
    most = (repeat[2] or repeat[1])[:LONGEST]
    n = min(one.n * max(int(most), 1), MOST)
    return Size(n, one.largest if one.largest and one.n > int(most) else repeat[0])


def _sum(sizes: list[Size]) -> Size:
    largest = max(sizes, key=lambda size: size.n, default=Size(0, ""))
    return Size(min(sum(size.n for size in sizes), MOST), largest.largest)
