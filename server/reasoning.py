"""Reasoning between <think> tags: how it is told from the answer, and what switches it.

Owns: Splitter (text pieces to parts), the words templates know for it. Must not know: field names
of any dialect, templates themselves, HTTP.

Whitespace beside a tag belongs to the tag; every other character lands in exactly one part,
however the text was cut. Only reasoning at the very beginning counts: later tags are text.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import refused

OPEN, CLOSE = "<think>", "</think>"
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCHES = ("enable_thinking", "thinking")
GRADE = "reasoning_effort"


TextPart: TypeAlias = tuple[bool, str]
"""Whether it is reasoning, and a stretch of an answer's text."""


class Splitter:
    """One answer's text, told apart piece by piece."""

    def __init__(self, begins_inside: bool) -> None:
        """begins_inside: the prompt has opened the reasoning already."""
        self.inside = begins_inside
        self._held = ""
        self._at_start = True  # an opening tag may come
        self._trims = False  # whitespace after a tag goes with it

    def push(self, text: str) -> list[TextPart]:
        held, self._held = self._held + text, ""
        if self._at_start and not self._started(held):
            self._held = held
            return []
        if self._at_start:
            self._at_start = False
            if held.lstrip().startswith(OPEN):
                held, self.inside = held.lstrip()[len(OPEN) :], True
            self._trims = self.inside
        parts: list[TextPart] = []
        if self.inside:
            reasoning, closed, held = self._trimmed(held).partition(CLOSE)
            kept = reasoning.rstrip() if closed else reasoning[: _safe_length(reasoning)]
            parts.append((True, kept))
            if closed:
                self.inside, self._trims = False, True
            else:
                self._held = reasoning[len(kept) :]
        if not self.inside:
            parts.append((False, self._trimmed(held)))
        return [part for part in parts if part[1]]

    def finish(self, text: str = "") -> list[TextPart]:
        """The last of it; what was never closed stays what it was."""
        parts = self.push(text)
        held, self._held = self._held, ""
        return [*parts, (self.inside, held)] if held else parts

    def _started(self, text: str) -> bool:
        """Whether it is known if an opening tag comes first."""
        text = text.lstrip()
        return not OPEN.startswith(text) or text == OPEN

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


def _safe_length(text: str) -> int:
    """Of the part that belongs to no closing tag, nor to whitespace before one."""
    n_begun = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
    return len(text[: len(text) - n_begun].rstrip())


class ThinkingWords(NamedTuple):
    """What a template's source tells about reasoning."""

    shows: bool
    """It writes think tags, so the model does."""
    switches: tuple[str, ...]
    """Variables that turn it on and off."""
    has_grade: bool

    @classmethod
    def of(cls, source: str) -> ThinkingWords:
        def has(name: str) -> bool:
            return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", source) is not None

        return cls(CLOSE in source, tuple(filter(has, SWITCHES)), has(GRADE))

    def arguments(self, effort: str | None, field: str) -> dict[str, Any]:
        """What to tell the template for an Effort; None leaves it as the template has it.

        Raises ApiError 400 naming `field` for what this model cannot do.
        """
        if effort is None:
            return {}
        is_on = effort != "none"
        if not self.shows and not self.has_grade:
            if is_on:
                raise refused(f"{field}: this model does not support thinking", param=field)
            return {}
        if not is_on and not self.switches:
            raise refused(f"{field}: this model's thinking cannot be turned off", param=field)
        graded = {GRADE: effort} if is_on and self.has_grade else {}
        return {**dict.fromkeys(self.switches, is_on), **graded}
