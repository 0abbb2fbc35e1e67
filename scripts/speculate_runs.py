"""Decoding with and without guesses, in turn: what was timed, and how sure a ratio of it is.
Owns the runs and their order; must not know where guesses come from, nor how a table looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from martlet.scripts.intervals import Ratio, ratio

if TYPE_CHECKING:
    from martlet.runtime.constraint import Allowed
    from martlet.runtime.model import Model
    from martlet.runtime.speculation import Speculation
    from martlet.runtime.step_costs import StepCosts

CONFIDENCE = 0.95
Outputs: TypeAlias = dict[str, list[int]]
"""What each task of a run has said, by its name."""


@dataclass(frozen=True)
class Task:
    prompt: list[int]
    output: list[int] | None = None
    """What it is made to say; None: what it says, `decode` tokens of it."""


@dataclass
class Pairs:
    """Seconds of runs in turn: without guesses, with them, without, …, without; with them twice at
    least."""

    tokens: int = 0
    """Of one run."""
    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def between(self) -> list[float]:
        """Without guesses, at the time of each run with them: the mean of its neighbours."""
        return [(a + b) / 2 for a, b in zip(self.plain, self.plain[1:], strict=False)]

    @property
    def ratio(self) -> Ratio:
        """Without guesses ÷ with them: above 1 they are faster."""
        return _ratio(self.between, self.auto)

    @property
    def control(self) -> Ratio:
        """Of neighbouring runs without guesses: 1, but for noise."""
        return _ratio(self.plain[:-1], self.plain[1:])

    def per_second(self, seconds: Sequence[float]) -> float:
        return self.tokens / float(np.median(seconds))


def _ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    return ratio(first, second, is_paired=True, confidence=CONFIDENCE)


def in_turn(
    model: Model,
    tasks: Sequence[Task],
    decode: int,
    repeat: int,
    speculation_of: Callable[[Outputs], Speculation],
) -> Pairs:
    """speculation_of: anew for each run, by what is said without guesses."""
    _, outputs = timed_run(model, tasks, decode, None)
    pairs = Pairs(sum(len(ids) - 1 for ids in outputs.values()))
    pairs.plain.append(timed_run(model, tasks, decode, None)[0])
    for _ in range(repeat):
        speculation = speculation_of(outputs)
        seconds, said = timed_run(model, tasks, decode, speculation)
        if said != outputs:
            raise AssertionError("a guess has changed a text")
        pairs.auto.append(seconds)
        pairs.plain.append(timed_run(model, tasks, decode, None)[0])
        pairs.drafted += speculation.counts.drafted
        pairs.accepted += speculation.counts.accepted
    return pairs


class Dictated:
    """A constraint that leaves one text."""

    def __init__(self, output: Sequence[int], vocab_size: int) -> None:
        self._output, self._at = output, 0
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)

    def allowed(self) -> Allowed:
        self._words[:] = 0
        if self._at < len(self._output):
            token = self._output[self._at]
            self._words[token // 32] = np.uint32(1 << token % 32)
        return self._words

    def accept(self, token_id: int) -> None:
        self._at += 1

    @property
    def is_done(self) -> bool:
        return self._at == len(self._output)


def timed_run(
    model: Model, tasks: Sequence[Task], decode: int, speculation: Speculation | None
) -> tuple[float, Outputs]:
    """Seconds from the step after all first tokens to the last, and what was said."""
    from martlet.runtime.engine import Engine
    from martlet.runtime.events import TokenEvent
    from martlet.runtime.sampling_params import SamplingParams

    engine = Engine(
        model.executor,
        model.tokenizer,
        context=model.context,
        prefix_reuse=False,
        speculation=speculation,
    )
    said: dict[str, list[int]] = {str(i): [] for i in range(len(tasks))}

    def listener(name: str) -> Any:
        def listen(event: object) -> None:
            if isinstance(event, TokenEvent):
                said[name].append(event.token_id)

        return listen

    for name, task in zip(said, tasks, strict=True):
        output = task.output
        params = SamplingParams(
            max_tokens=decode if output is None else len(output),
            temperature=0.0,
            ignore_eos=output is None,
        )
        ends = None if output is None else Dictated(output, model.tokenizer.vocab_size)
        engine.submit(task.prompt, params, listener(name), request_id=name, constraint=ends)
    while not all(said.values()):
        engine.step()
    start = time.perf_counter()
    while engine.step():
        pass
    return time.perf_counter() - start, said


def new_costs(model: Model) -> StepCosts:
    from martlet.runtime.step_costs import StepCosts

    return StepCosts.measure(model.executor, len(model.adapters))
