"""Typed access to the metadata keys of one architecture; every refusal names key and value.

Must not know what any key means. Values are already Python numbers, strings, lists or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import FileFormatError, UnsupportedError


class Keys:
    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise FileFormatError(f"metadata key '{self.arch}.{key}' is missing; fetch it again")
        return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FileFormatError(f"{self.arch}.{key} is {value!r}, expected a number")
        if not math.isfinite(value):
            raise FileFormatError(f"{self.arch}.{key} is {value}, expected a finite number")
        return float(value)

    def scale(self, key: str, default: float = 1.0) -> float:
        """A factor above 0; as other readers have it, 0 is as good as none."""
        value = self.number(key, default) or default
        if value < 0:
            raise FileFormatError(f"{self.arch}.{key} is {value:g}, expected a number above 0")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; positive where the key is required, else 0 is allowed."""
        return self._count(key, self.get(key, default), least=1 if default is None else 0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise FileFormatError(f"{self.arch}.{key} is {value!r}, expected true or false")
        return value

    def per_layer(
        self, key: str, n_layers: int, default: list[int] | None = None, *, least: int = 1
    ) -> list[int]:
        """One count per layer, from a list or one number for all."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * n_layers
        if len(values) != n_layers:
            raise FileFormatError(
                f"{self.arch}.{key} has {len(values)} values for {n_layers} layers"
            )
        return [self._count(key, v, least) for v in values]

    def refuse(self, unsupported: Mapping[str, tuple[str, float]]) -> None:
        """Refuses keys (what they ask for, neutral value) that are neither neutral nor 0."""
        for key, (what, neutral) in unsupported.items():
            value = self.number(key, neutral)
            if value not in (neutral, 0):
                raise UnsupportedError(f"{self.arch}.{key} is {value:g}: {what} are not supported")

    def _count(self, key: str, value: Any, least: int) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value < 2**31:
            raise FileFormatError(
                f"{self.arch}.{key} is {value!r}, expected a whole number from {least}"
            )
        return int(value)
