"""What the engine and what grammars ask of a tokenizer.

Owns: these two interfaces. Must not know: how text becomes tokens.
"""

from __future__ import annotations

from typing import Protocol

from .textstream import TokenBytes


class Vocabulary(TokenBytes, Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eog_ids(self) -> frozenset[int]: ...


class WritableVocabulary(Vocabulary, Protocol):
    """One whose texts can be written in tokens, too."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...
