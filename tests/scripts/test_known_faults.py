"""docs/known-faults.md names every fault once, and tests that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "known-faults.md"
LAST = 120
ROW = re.compile(r"\| B(\d+) \| ([^|]+) \| ([^|]+) \|")


def rows() -> list[tuple[int, str, list[str]]]:
    """Number, fault and tests of each row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| B")]
    found = [ROW.fullmatch(line) for line in lines]
    return [(int(m[1]), m[2], re.findall(r"`([^`]+)`", m[3])) for m in found if m]


@cache
def names_in(file: str) -> set[str]:
    """What pytest finds at the top of a file of tests."""
    names = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):  # the case of a state machine
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith("test_")}


def test_no_fault_is_left_out() -> None:
    assert [number for number, _, _ in rows()] == list(range(2, LAST + 1, 2))
    assert all(len(fault.split()) <= 10 for _, fault, _ in rows())


def test_every_fault_is_held_by_tests_that_there_are() -> None:
    missing = []
    for number, _, tests in rows():
        assert tests, number
        for test in tests:
            file, name = test.split("::")
            if not (TESTS / file).is_file() or name not in names_in(file):
                missing.append((number, test))
    assert not missing
