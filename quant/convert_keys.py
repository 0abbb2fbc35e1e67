"""Typed access to the keys of a config.json. Knows no key of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .convert_rope import positive
from .errors import FileFormatError


class ConfigKeys:
    """Typed access; every refusal names key and value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise FileFormatError(
                f"config.json: {key} is {value!r}, expected a whole number from 1"
            )
        return value

    def number(self, key: str) -> float:
        return positive(key, self.values.get(key))
