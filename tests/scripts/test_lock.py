"""requirements.lock holds what pyproject.toml asks for, by hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

if not (ROOT / "requirements.lock").exists():
    pytest.skip("not in a checkout", allow_module_level=True)

# name==version of a line; a name may stand several times, for platforms that differ
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def asked() -> list[Requirement]:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found
    return [Requirement(line) for line in re.findall(r'"(.+)"', found[1])]


def pins() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, version in PINNED.findall((ROOT / "requirements.lock").read_text()):
        found.setdefault(canonicalize_name(name), []).append(version)
    return found


@pytest.mark.parametrize("requirement", asked(), ids=lambda each: each.name)
def test_each_dependency_is_locked_within_its_bounds(requirement: Requirement) -> None:
    versions = pins()[canonicalize_name(requirement.name)]
    assert all(requirement.specifier.contains(version) for version in versions)


def test_each_pin_has_its_hash() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == sum(map(len, pins().values())) > 20
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_no_index_is_named() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()
