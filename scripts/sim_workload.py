"""A workload of load_workload.py as token ids, for engines on paper.

Owns: what users ask, when, and what they ask next. Must not know: replicas, costs.
Own tokens are drawn at random, so that nothing is equal by chance; prefixes are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from martlet.scripts.load_workload import Load, Shape, due_times
from martlet.scripts.sim_replica import Asked

Tokens = npt.NDArray[np.int32]


@dataclass
class Users:
    shape: Shape
    load: Load
    n_requests: int
    vocab_size: int
    seed: int = 0
    think_s: float = 0.0
    """Mean time from an answer to what the same user asks next (exponential); of closed loops also
    before the first question, so that users do not all come at once."""
    lengths: Sequence[tuple[int, int]] = ()
    """Prompt and output of each request in the order of asking, where they are not to be drawn."""
    n_asked: int = 0
    _prefixes: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = Random(self.seed)
        self._ids = np.random.default_rng(self.seed)
        shared = np.random.default_rng([self.seed, 1])
        if self.shape.prefix:
            self._prefixes = [
                shared.integers(self.vocab_size, size=self.shape.prefix, dtype=np.int32)
                for _ in range(self.shape.n_prefixes)
            ]

    def arrivals(self) -> Iterator[Asked]:
        """First questions, in order of time."""
        load = self.load
        if load.n_streams is not None:
            starts = sorted(self._pause() for _ in range(load.n_streams))
            yield from (asked for at_s in starts if (asked := self._first(at_s)))
            return
        if load.trace:
            for each in load.trace:
                at_s = each.at_s - load.trace[0].at_s
                yield self._asked(at_s, self._beginning(), each.prompt, each.output)
            return
        for due_s in due_times(load, -(-self.n_requests // self.shape.turns), self._draw):
            if asked := self._first(due_s or 0.0):
                yield asked

    def follow(self, asked: Asked) -> Asked | None:
        """What the same user asks next: the next turn, or in a closed loop something else."""
        if self.load.trace:
            return None
        at_s = asked.end_s + self._pause()
        if asked.turn + 1 == self.shape.turns:
            return None if self.load.n_streams is None else self._first(at_s)
        if self.n_asked == self.n_requests:
            return None
        n_prompt, n_output = self._lengths()
        following = self._asked(at_s, asked.tokens, n_prompt, n_output)
        following.turn = asked.turn + 1
        return following

    def _first(self, at_s: float) -> Asked | None:
        if self.n_asked == self.n_requests:
            return None
        return self._asked(at_s, self._beginning(), *self._lengths())

    def _asked(self, at_s: float, before: Tokens, n_prompt: int, n_output: int) -> Asked:
        self.n_asked += 1
        own = self._ids.integers(self.vocab_size, size=n_prompt + n_output, dtype=np.int32)
        return Asked(np.concatenate([before, own]), len(before) + n_prompt, at_s)

    def _beginning(self) -> Tokens:
        return self._draw.choice(self._prefixes) if self._prefixes else np.empty(0, np.int32)

    def _lengths(self) -> tuple[int, int]:
        if self.lengths:
            return self.lengths[self.n_asked]
        return self.shape.prompt.draw(self._draw), self.shape.output.draw(self._draw)

    def _pause(self) -> float:
        return self._draw.expovariate(1 / self.think_s) if self.think_s else 0.0
