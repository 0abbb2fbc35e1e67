"""Engines over scripted models, stepped by hand, and what their requests said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from martlet.runtime.engine import Engine
from martlet.runtime.events import Event, FinishEvent, TokenEvent
from martlet.runtime.sampling import SamplingParams

from .scripted import Script, ScriptedExecutor, ScriptedTokenizer, hashed


@dataclass
class Answer:
    """Collects the events of one request; asserts that they come as promised."""

    tokens: list[TokenEvent] = field(default_factory=list)
    end: FinishEvent | None = None

    def __call__(self, event: Event) -> None:
        assert self.end is None, "an event after the end"
        if isinstance(event, FinishEvent):
            self.end = event
        else:
            assert event.index == len(self.tokens)
            self.tokens.append(event)

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.tokens]

    @property
    def finish(self) -> FinishEvent:
        assert self.end is not None, "the request has not finished"
        return self.end

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens) + self.finish.text


def engine_of(
    script: Script | None = None,
    *,
    context: int = 64,
    eog_ids: Sequence[int] | None = None,
    executor: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Engine, ScriptedExecutor]:
    scripted = ScriptedExecutor(script or hashed(), **(executor or {}))
    tokenizer = ScriptedTokenizer() if eog_ids is None else ScriptedTokenizer(eog_ids=eog_ids)
    return Engine(scripted, tokenizer, context=context, **options), scripted


def ask(
    engine: Engine, prompt: Sequence[int], *, request_id: str | None = None, **params: Any
) -> Answer:
    answer = Answer()
    params.setdefault("temperature", 0.0)
    engine.submit(prompt, SamplingParams(**params), answer, request_id=request_id)
    return answer


def run_all(engine: Engine, most_steps: int = 5000) -> None:
    """Steps until idle, proving all invariants after each."""
    for _ in range(most_steps):
        if not engine.step():
            assert engine.stats().blocks_used == 0, "idle, but blocks are held"
            return
        engine.scheduler.check()
    raise AssertionError(f"not idle after {most_steps} steps")
