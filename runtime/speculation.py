"""How many guessed tokens a step checks: what is expected of them against what their rows cost.

Owns: the choice of lengths, what is known of each request's guesses. Must not know: where guesses
come from (drafts.py), how rows are computed, how tokens are drawn.

A guess never changes the text. Its rows are computed behind the request's own; tokens are drawn
from the logits in order, by the same keyed numbers as ever, and the first that is not the guessed
one ends the walk (sample and match). Rows do not depend on each other's company, so each token is
the one that would have been drawn without guesses, at any temperature. A request may ask for the
rule of rejection.py instead: its text may then be another one, of the same distribution.

With acceptance a per token, g guesses are expected to give a + a^2 + … + a^g tokens more. Lengths
are chosen so that a step gives most tokens per second by these numbers and StepCosts; where that is
less than WORTH times what the step gives without any, nothing is guessed, but for one token now and
then, to notice when guesses get better (Leviathan et al., 2023, arXiv:2211.17192, section 3.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from .drafts import NO_DRAFT, Draft, Drafter, PromptLookup
from .errors import RequestError
from .events import DraftCounts
from .executors import Executor
from .pooling import Hidden
from .request import Request, Scheduled
from .step import MOST_GUESSES
from .step_costs import StepCosts

MOST = MOST_GUESSES
WORTH = 1.05
PROBE_EVERY = 64
"""Output tokens of a request without a guess, after which one is tried."""
LEAST_STEP_S = 0.0015
"""Below, the choice of lengths takes more than 3 % of a step: auto leaves it."""
FIRST_LOAN, LOAN_SHARE = 0.5, 0.01
"""Tokens that the guesses of a request may lose: at once, and for each token of its output."""
MOST_LOAN = 1.0
"""Of which so many are kept for later. A guess of one token that takes more never pays."""
MOST_SPARE = 16.0
"""Tokens that were gained and may be lost again."""
_WEIGHT = 0.15  # of one more guess in its running mean; the first ones weigh more
_WEIGHT_OF_ALL = 0.02  # the same in the mean over all requests, with which each begins
_PRIOR_GUESSES = 3  # that the prior is worth


@dataclass
class Counts:
    """Rises only."""

    sources: dict[str, DraftCounts] = field(default_factory=dict)
    lengths: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Guesses checked, by who has guessed and how many of their tokens were right."""
    extra_s: float = 0.0
    """What rows of guesses have taken by StepCosts: calculated."""

    @property
    def drafted(self) -> int:
        return DraftCounts.total(self.sources.values()).drafted

    @property
    def accepted(self) -> int:
        return DraftCounts.total(self.sources.values()).accepted

    def count(self, source: str, drafted: int, accepted: int) -> None:
        before = self.sources.get(source, DraftCounts())
        self.sources[source] = before + DraftCounts(drafted, accepted)
        self.lengths[source, accepted] += 1


@dataclass
class _Rates:
    """How often guesses are right, by kind: running means."""

    means: list[float]
    least_weight: float
    n_seen: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.n_seen = [0] * len(self.means)

    def learn(self, kind: int, is_right: bool) -> None:
        self.n_seen[kind] += 1
        weight = max(self.least_weight, 1 / (_PRIOR_GUESSES + self.n_seen[kind]))
        self.means[kind] += weight * (is_right - self.means[kind])


@dataclass
class _Record:
    """What is known of one request's guesses."""

    of_kinds: _Rates
    silent_since: int  # output tokens when something was guessed last
    n_lent: int  # output tokens whose share is in `spare`
    spare: float = FIRST_LOAN
    """Tokens that its guesses may still lose."""

    @property
    def rates(self) -> list[float]:
        return self.of_kinds.means

    def lend(self, n_output: int) -> None:
        """What was lost comes back by and by."""
        self.spare += max(0.0, min(MOST_LOAN - self.spare, LOAN_SHARE * (n_output - self.n_lent)))
        self.n_lent = n_output

    def settle(self, price: float, n_given: int) -> None:
        self.spare = min(self.spare - price + n_given, MOST_SPARE)


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        costs: StepCosts | None = None,
        *,
        length: int | None = None,
        rule: str = "match",
    ) -> None:
        """length: always so many tokens, if they can be guessed; None: as many as pay, by costs.
        rule: when a guess stands, for requests that do not say (SamplingParams)."""
        assert costs or length
        self.drafter, self.costs, self.length, self.rule = drafter, costs, length, rule
        self.counts = Counts()
        self._records: dict[str, _Record] = {}
        self._of_all = _Rates(list(drafter.priors), _WEIGHT_OF_ALL)
        self._price_each = 0.0  # of the guessed tokens of this step

    def drafts(self, granted: Sequence[Scheduled], most_rows: int) -> list[Draft]:
        """A guess for each item, many of them empty, for at most most_rows rows in all."""
        nothing = [NO_DRAFT] * len(granted)
        # Beside prompts rows are dear: nothing waits for memory then.
        if any(not item.request.is_streaming for item in granted):
            return nothing
        requests = [item.request for item in granted]
        able = requests if self.length else [r for r in requests if self._record(r).spare > 0]
        most = min(self.length or MOST, most_rows - len(requests))
        if most < 1 or not able:
            return nothing
        token_s = self.drafter.token_seconds(len(able))
        if token_s and not self.length:
            most = min(most, self._common_length(able, len(requests), most_rows, token_s))
            if most < 1:
                return nothing
        proposed = zip(able, self.drafter.propose(able, most), strict=True)
        of_ids = {request.id: draft for request, draft in proposed}
        found = [
            draft.first(_room(request))._replace(source=draft.source or self.drafter.name)
            for request in requests
            for draft in [of_ids.get(request.id, NO_DRAFT)]
        ]
        if not any(draft.tokens for draft in found):
            return nothing
        if self.length or token_s:
            lengths = [len(draft.tokens) for draft in found]
            while sum(lengths) > most_rows - len(granted):
                lengths[lengths.index(max(lengths))] -= 1
        else:
            lengths = self._lengths(requests, found, most_rows)
        if self.costs and any(lengths):
            price = self._price(len(lengths), sum(lengths), max(lengths) * token_s)
            self._price_each = price / sum(lengths)
        return [draft.first(n) for draft, n in zip(found, lengths, strict=True)]

    def seen_from(self, n_prompt: int) -> int | None:
        """The first token of a request whose hidden state is to be shown; None: there is none."""
        reach = self.drafter.reach
        return max(0, n_prompt - reach) if reach else None

    def see(self, granted: Sequence[Scheduled], hidden: Hidden) -> None:
        """What a step has computed, before it is committed."""
        at = 0
        for item in granted:
            rows = hidden[at : at + item.n_hidden]
            at += item.n_hidden
            if len(rows) and item.request.seen_from is not None:
                self.drafter.see(item.request, item.first_hidden, rows)

    def learn(self, request: Request, draft: Draft, n_accepted: int) -> None:
        """So many of the draft's tokens were drawn."""
        n = len(draft.tokens)
        self.counts.count(draft.source, n, n_accepted)
        record = self._records.get(request.id)
        if record is None:  # it has ended by one of them
            return
        record.silent_since = request.n_output
        record.settle(n * self._price_each, n_accepted)
        for place in range(min(n_accepted + 1, n)):
            for rates in (record.of_kinds, self._of_all):
                rates.learn(draft.kind, place < n_accepted)

    def observe(self, n_rows: int, n_streams: int, seconds: float) -> None:
        """A step has taken so long; all its rows were of streams."""
        if self.costs:
            alone_s = self.costs.of(n_streams)
            self.counts.extra_s += max(0.0, self.costs.of(n_rows) - alone_s)
            self.costs.observe(n_rows, seconds)

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats. From any thread."""
        counts = self.counts
        return {
            "drafts": dict(counts.sources),
            "draft_lengths": dict(counts.lengths),
            "draft_seconds": counts.extra_s,
        }

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        self.drafter.forget(request)

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request.id)
        if record is None:
            rates = _Rates(self._of_all.means[:], _WEIGHT)
            record = self._records[request.id] = _Record(rates, request.n_output, request.n_output)
        record.lend(request.n_output)
        return record

    def _price(self, n: int, n_guessed: int, token_s: float = 0.0) -> float:
        """What so many guessed tokens take beside n rows, in tokens of a step without any. token_s:
        of guessing them."""
        assert self.costs
        alone_s = self.costs.of(n)
        return n * (self.costs.of(n + n_guessed) + token_s - alone_s) / alone_s

    def _common_length(
        self, able: Sequence[Request], n_all: int, most_rows: int, token_s: float
    ) -> int:
        """Where guessing takes its time: how many tokens to guess for each of the able ones."""
        records = [self._record(request) for request in able]
        rates, spare = [r.rates[0] for r in records], sum(r.spare for r in records)
        best = self._best_length(rates, n_all, most_rows, token_s, spare)
        return best or int(self._is_time_to_probe(able, n_all, most_rows, token_s))

    def _best_length(
        self,
        rates: Sequence[float],
        n_all: int,
        most_rows: int,
        token_s: float,
        spare: float = math.inf,
    ) -> int:
        """Of as many guessed tokens for each of some requests, with these acceptances."""
        assert self.costs
        n, chances = len(rates), list(rates)
        expected, best_length = float(n_all), 0
        best = WORTH * expected / self.costs.of(n_all)
        for length in range(1, min(MOST, (most_rows - n_all) // n) + 1):
            if self._price(n_all, n * length, length * token_s) > spare:
                break
            expected += sum(chances)
            per_second = expected / (self.costs.of(n_all + n * length) + length * token_s)
            if per_second > best:
                best, best_length = per_second, length
            chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
        return best_length

    def _is_time_to_probe(
        self, requests: Sequence[Request], n_all: int, most_rows: int, token_s: float = 0.0
    ) -> bool:
        """Nothing was guessed for long, guesses that are all right would pay, and one of each is to
        be had."""
        records = [self._record(request) for request in requests]
        silent = (r.n_output - e.silent_since for r, e in zip(requests, records, strict=True))
        price = self._price(n_all, len(requests), token_s)
        is_due = min(silent) >= PROBE_EVERY and price <= sum(e.spare for e in records)
        return is_due and self._best_length([1.0] * n_all, n_all, most_rows, token_s) > 0

    def _lengths(
        self, requests: Sequence[Request], drafts: Sequence[Draft], most_rows: int
    ) -> list[int]:
        """The rows with the most expected tokens first, up to where a second gives most of them."""
        assert self.costs
        queue: list[tuple[float, int]] = []  # (-chance that this one more row counts, request)
        records = [self._record(request) for request in requests]
        rates = [r.rates[draft.kind] for r, draft in zip(records, drafts, strict=True)]
        spare = [record.spare for record in records]
        for i, draft in enumerate(drafts):
            if draft.tokens:
                heappush(queue, (-rates[i], i))
        n_rows, n_guessed, paid = len(requests), 0, 0.0
        expected, lengths = float(n_rows), [0] * n_rows
        best, best_lengths = WORTH * expected / self.costs.of(n_rows), lengths[:]
        while queue and n_guessed < most_rows - n_rows:
            chance, i = heappop(queue)
            price = self._price(n_rows, n_guessed + 1) - paid
            if price > spare[i]:
                continue
            spare[i] -= price
            paid += price
            n_guessed += 1
            expected -= chance
            lengths[i] += 1
            per_second = expected / self.costs.of(n_rows + n_guessed)
            if per_second > best:
                best, best_lengths = per_second, lengths[:]
            if lengths[i] < len(drafts[i].tokens):
                heappush(queue, (chance * rates[i], i))
        if not any(best_lengths):
            for i, request in enumerate(requests):
                if drafts[i].tokens and self._is_time_to_probe([request], n_rows, most_rows):
                    best_lengths[i] = 1
                    break
        return best_lengths


def speculation_of(
    wish: str,
    executor: Executor,
    *,
    drafter: Drafter | None = None,
    generates: bool = True,
    n_adapters: int = 0,
    rule: str = "match",
) -> Speculation | None:
    """wish: off; auto, as many guesses as pay, by a measurement that this makes; or how many tokens
    always. drafter: None for prompt lookup. Models whose steps are over at once have none by auto.
    Raises RequestError."""
    most = most_guesses(wish)
    if executor.n_states and executor.n_guesses < most:
        raise RequestError(
            f"speculate is {wish!r}, and the model was opened with room to take back "
            f"{executor.n_guesses} guesses of a sequence; open it with guesses={most}"
        )
    if not most or (wish == "auto" and not generates):
        return None
    drafter = drafter or PromptLookup()
    if wish == "auto":
        costs = StepCosts.measure(executor, n_adapters)
        return Speculation(drafter, costs, rule=rule) if costs.of(1) >= LEAST_STEP_S else None
    return Speculation(drafter, length=most, rule=rule)


def most_guesses(wish: str) -> int:
    """Guessed tokens of a request and step at most. Raises RequestError where it is no wish."""
    if wish in ("auto", "off"):
        return MOST if wish == "auto" else 0
    if not wish.isdecimal() or not 1 <= int(wish) <= MOST:
        raise RequestError(f"speculate is {wish!r}, expected auto, off or 1 to {MOST}")
    return int(wish)


def _room(request: Request) -> int:
    """Tokens that may be guessed: one more is drawn behind them."""
    return max(0, len(request.buffer) - request.n_tokens - 1)
