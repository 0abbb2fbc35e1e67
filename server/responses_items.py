"""Output items of /v1/responses: reasoning, messages and function calls.

Owns: their shapes, the names of their events. Must not know: streams, the response around them.
"""

from __future__ import annotations

from typing import NamedTuple

from . import parts
from .parts import Run
from .reply import Json


class ItemKind(NamedTuple):
    """A kind of output item. Those with a part have their text in it, the others in `text_key`."""

    id_prefix: str
    item: Json
    events: str
    part: Json | None
    text_key: str = "text"
    has_logprobs: bool = False


ITEM_KINDS: dict[parts.Kind, ItemKind] = {
    "reasoning": ItemKind(
        "rs_",
        {"type": "reasoning", "summary": []},
        "response.reasoning_text",
        {"type": "reasoning_text"},
    ),
    "text": ItemKind(
        "msg_",
        {"type": "message", "role": "assistant"},
        "response.output_text",
        {"type": "output_text", "annotations": []},
        has_logprobs=True,
    ),
    "call": ItemKind(
        "fc_",
        {"type": "function_call"},
        "response.function_call_arguments",
        None,
        text_key="arguments",
    ),
}


class Item:
    """One output item, at its place among the others."""

    def __init__(self, run: Run, index: int, reply_id: str) -> None:
        self.run, self.kind = run, ITEM_KINDS[run.kind]
        self.id = f"{self.kind.id_prefix}{reply_id.removeprefix('resp_')}_{index}"
        self.place: Json = {"item_id": self.id, "output_index": index}
        """Where a delta belongs."""
        if self.kind.part:
            self.place["content_index"] = 0

    def begun(self) -> Json:
        return self._shape([], "", "in_progress")

    def written(self, logprobs: list[Json], status: str) -> Json:
        """As far as its run has come."""
        return self._shape([self.part(self.run.text, logprobs)], self.run.text, status)

    def part(self, text: str, logprobs: list[Json]) -> Json:
        return {**(self.kind.part or {}), "text": text, **self.with_logprobs(logprobs)}

    def with_logprobs(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs} if self.kind.has_logprobs else {}

    def done(self, logprobs: list[Json]) -> Json:
        """What the event at the end of its text tells beside the place."""
        told = {self.kind.text_key: self.run.text, **self.with_logprobs(logprobs)}
        return told if self.kind.part else {"name": self.run.name, **told}

    def _shape(self, content: list[Json], arguments: str, status: str) -> Json:
        own: Json = {"content": content}
        if not self.kind.part:
            own = {"call_id": self.run.id, "name": self.run.name, "arguments": arguments}
        return {"id": self.id, **self.kind.item, **own, "status": status}
