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
PRIOR = 0.4
"""Acceptance of what was never tried."""
_WEIGHT = 0.15  # of one more guess in its running mean; the first ones weigh more
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
class _Record:
    """What is known of one request's guesses."""

    rates: list[float]  # by kind
    n_seen: list[int]  # the same: guesses behind a rate
    silent_since: int = 0  # output tokens when something was guessed last


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

    def drafts(self, granted: Sequence[Scheduled], most_rows: int) -> list[Draft]:
        """A guess for each item, many of them empty, for at most most_rows rows in all."""
        nothing = [NO_DRAFT] * len(granted)
        # Beside prompts rows are dear: nothing waits for memory then.
        if any(not item.request.is_streaming for item in granted):
            return nothing
        most = min(self.length or MOST, most_rows - len(granted))
        if most < 1:
            return nothing
        requests = [item.request for item in granted]
        token_s = self.drafter.token_seconds(len(requests))
        if token_s and not self.length:
            most = min(most, self._common_length(requests, most_rows, token_s))
            if most < 1:
                return nothing
        found = [
            draft.first(_room(request))._replace(source=draft.source or self.drafter.name)
            for request, draft in zip(requests, self.drafter.propose(requests, most), strict=True)
        ]
        if self.length or token_s:
            lengths = [len(draft.tokens) for draft in found]
            while sum(lengths) > most_rows - len(granted):
                lengths[lengths.index(max(lengths))] -= 1
        else:
            lengths = self._lengths(requests, found, most_rows)
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
        rates, n_seen = record.rates, record.n_seen
        for place in range(min(n_accepted + 1, n)):
            n_seen[draft.kind] += 1
            weight = max(_WEIGHT, 1 / (_PRIOR_GUESSES + n_seen[draft.kind]))
            rates[draft.kind] += weight * ((place < n_accepted) - rates[draft.kind])

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
        n_kinds = self.drafter.n_kinds
        made = _Record([PRIOR] * n_kinds, [0] * n_kinds, request.n_output)
        return self._records.setdefault(request.id, made)

    def _common_length(self, requests: Sequence[Request], most_rows: int, token_s: float) -> int:
        """Where guessing takes its time: how many tokens to guess for each request."""
        records = [self._record(request) for request in requests]
        best = self._best_length([record.rates[0] for record in records], most_rows, token_s)
        return best or int(self._is_time_to_probe(requests, most_rows, token_s))

    def _best_length(self, rates: Sequence[float], most_rows: int, token_s: float) -> int:
        """Of as many guessed tokens for each request, with these acceptances."""
        assert self.costs
        n, chances = len(rates), list(rates)
        expected, best_length = float(n), 0
        best = WORTH * expected / self.costs.of(n)
        for length in range(1, min(MOST, most_rows // n - 1) + 1):
            expected += sum(chances)
            per_second = expected / (self.costs.of(n * (1 + length)) + length * token_s)
            if per_second > best:
                best, best_length = per_second, length
            chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
        return best_length

    def _is_time_to_probe(
        self, requests: Sequence[Request], most_rows: int, token_s: float = 0.0
    ) -> bool:
        """Nothing was guessed for long, and guesses that are all right would pay."""
        silent = (r.n_output - self._record(r).silent_since for r in requests)
        is_due = min(silent) >= PROBE_EVERY
        return is_due and self._best_length([1.0] * len(requests), most_rows, token_s) > 0

    def _lengths(
        self, requests: Sequence[Request], drafts: Sequence[Draft], most_rows: int
    ) -> list[int]:
        """The rows with the most expected tokens first, up to where a second gives most of them."""
        assert self.costs
        queue: list[tuple[float, int]] = []  # (-chance that this one more row counts, request)
        rates = []
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            rates.append(self._record(request).rates[draft.kind])
            if draft.tokens:
                heappush(queue, (-rates[i], i))
        n_rows = len(requests)
        expected, lengths = float(n_rows), [0] * n_rows
        best, best_lengths = WORTH * expected / self.costs.of(n_rows), lengths[:]
        while queue and sum(lengths) < most_rows - n_rows:
            chance, i = heappop(queue)
            expected -= chance
            lengths[i] += 1
            per_second = expected / self.costs.of(n_rows + sum(lengths))
            if per_second > best:
                best, best_lengths = per_second, lengths[:]
            if lengths[i] < len(drafts[i].tokens):
                heappush(queue, (chance * rates[i], i))
        if not any(best_lengths):
            for i, request in enumerate(requests):
                if drafts[i].tokens and self._is_time_to_probe([request], most_rows):
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
