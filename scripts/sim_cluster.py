"""Replicas under a load in virtual time: who asks when, who is asked, and what they saw.

Owns: the order of events. Must not know: what a step costs, how a policy chooses, what figures
mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from martlet.runtime.aggregates import NS_PER_S, Seen
from martlet.scripts.sim_costs import Costs
from martlet.scripts.sim_replica import Asked, Replica
from martlet.scripts.sim_routing import Route

Next = Callable[[Asked], "Asked | None"]


@dataclass
class Cluster:
    costs: Costs
    n_replicas: int
    route: Route
    on_end: Callable[[Asked], None] = lambda asked: None
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [Replica(self.costs, self._ended, n) for n in range(self.n_replicas)]
        self._events: list[tuple[float, int, Asked | Replica]] = []
        self._order = count()
        self._versions = [0] * self.n_replicas
        self._now_s = 0.0

    def run(self, arrivals: Iterator[Asked], follow: Next = lambda asked: None) -> None:
        """arrivals: in order of time. follow: what the same user asks after an answer, if anything.
        Ends when all is answered."""
        self._follow = follow
        coming = next(arrivals, None)
        while coming is not None or self._events:
            if coming is not None and (not self._events or coming.at_s <= self._events[0][0]):
                self._push(coming.at_s + self.costs.front_s, coming)
                coming = next(arrivals, None)
                continue
            self._now_s, order, what = heapq.heappop(self._events)
            if isinstance(what, Asked):
                self._arrive(what)
            elif self._versions[what.number] == order:
                what.end()
                self._begin(what)

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest replica over the mean."""
        busy = [each.busy_s for each in self.replicas]
        return max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0

    def _push(self, at_s: float, what: Asked | Replica) -> int:
        order = next(self._order)
        heapq.heappush(self._events, (at_s, order, what))
        return order

    def _arrive(self, asked: Asked) -> None:
        replica = self.route(self.replicas, asked)
        replica.submit(asked)
        if replica.stretch is None:
            self._begin(replica)
        elif replica.stretch.n_steps > 1:
            replica.cut(self._now_s)
            self._versions[replica.number] = self._push(replica.stretch.end_s, replica)

    def _begin(self, replica: Replica) -> None:
        if stretch := replica.begin(self._now_s):
            self._versions[replica.number] = self._push(stretch.end_s, replica)

    def _ended(self, asked: Asked) -> None:
        self.seen.append(as_seen(asked))
        self.on_end(asked)
        if following := self._follow(asked):
            self._push(following.at_s + self.costs.front_s, following)


def as_seen(asked: Asked) -> Seen:
    """What its client saw: the first token, and the others by the end."""
    first, end = round(asked.first_s * NS_PER_S), round(asked.end_s * NS_PER_S)
    n_output = len(asked.tokens) - asked.n_prompt
    return Seen(
        arrived_ns=round(asked.at_s * NS_PER_S),
        end_ns=end,
        outcome="ok",
        n_output=n_output,
        n_prompt=asked.n_prompt,
        n_cached=asked.n_cached,
        piece_ns=(first, end) if n_output > 1 else (first,),
        piece_tokens=(1, n_output - 1) if n_output > 1 else (1,),
    )


def cached_share(seen: Sequence[Seen]) -> float:
    """Of all prompt tokens, those that were not computed."""
    n_prompt = sum(each.n_prompt or 0 for each in seen)
    return sum(each.n_cached for each in seen) / n_prompt if n_prompt else 0.0
