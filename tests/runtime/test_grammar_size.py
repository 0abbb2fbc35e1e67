"""The size of a regular expression by counting, and where a schema has some."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from martlet.runtime.grammar_size import MOST, patterns_of, written_out


@pytest.mark.parametrize(
    ("pattern", "n", "largest"),
    [
        ("abc", 3, ""),
        ("a{1000000}", 1_000_000, "{1000000}"),
        ("(a{1000}){1000}", 1_000_000, "{1000}"),
        ("(?:ab{3}|[x-z]){2,5}c", 26, "{2,5}"),
        ("a{7,}b+c*", 9, "{7,}"),
        (r"\{9\}\d{4}", 7, "{4}"),
        ("[{9}]{2}[]{]", 3, "{2}"),
        ("{5}a{0}", 1, "{0}"),
        ("((a{9}", 9, "{9}"),
        ("a){3}", 3, "{3}"),
        (r"(?P<x>a)(?i:[^]\]]b){2}", 5, "{2}"),
        ("", 0, ""),
        ("a{99999999999999999999999}", 999_999_999_999, "{99999999999999999999999}"),
        ("a" + "{9}" * 5000, MOST, "{9}"),
    ],
)
def test_repeats_are_written_out(pattern: str, n: int, largest: str) -> None:
    assert written_out(pattern) == (n, largest)


@given(st.text("ab(){}[]|\\,19^-?*", max_size=40))
def test_anything_is_counted(pattern: str) -> None:
    assert written_out(pattern).n >= 0


def test_long_patterns_are_counted_at_once() -> None:
    begun = time.process_time()
    written_out("(" * 50_000 + "a{2}" * 20_000 + ")" * 50_000)
    written_out("[" * 100_000)
    assert time.process_time() - begun < 5  # quadratic: minutes


def test_patterns_of_a_schema() -> None:
    schema = {
        "pattern": "a",
        "properties": {"pattern": {"pattern": "b"}, "x": {"items": [{"pattern": "c"}]}},
        "patternProperties": {"d": True},
        "enum": [{"pattern": 5}],
    }
    assert sorted(patterns_of(schema)) == ["a", "b", "c", "d"]
    assert not [*patterns_of(True)]
