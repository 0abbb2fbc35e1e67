"""Counts of what the engine did, for /metrics and benchmarks.

Owns: their definitions. Must not know: metric names or formats (server).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .constraint import Allowed, Constraint
from .events import FINISH_REASONS, DraftCounts, FinishReason
from .prefix_index import MissReason
from .request import Request, Scheduled
from .scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Tokens, steps, preemptions and finished only ever rise."""

    running: int
    waiting: int
    """Accepted and not running: new, queued, or preempted."""
    blocks_total: int
    blocks_used: int
    """Held by running requests."""
    blocks_cached: int
    """Not held, but keeping a known prefix; given up when blocks are needed."""
    tokens_prefilled: int
    """Prompt rows computed for the first time."""
    tokens_decoded: int
    """Output tokens drawn."""
    tokens_cached: int
    """Prompt tokens that were not computed because the prefix cache held them."""
    tokens_recomputed: int
    """Rows computed again after a preemption."""
    steps: int
    preemptions: int
    finished: Mapping[FinishReason, int]
    block_tokens: int = 0
    """Slots of a block."""
    rows: int = 0
    """Computed in all steps, those of guesses and repeated ones included."""
    blocks_shared: int = 0
    """Held by more than one running request."""
    window_blocks_total: int = 0
    """Blocks that layers with a window have of their own; 0: no model layer has one, or all blocks
    have their place there."""
    window_blocks_used: int = 0
    """Those that running requests still see."""
    fragmentation: float = 1.0
    """Slots of held blocks ÷ tokens in them."""
    masks: int = 0
    """Tokens drawn under a constraint."""
    mask_seconds: float = 0.0
    """Time the engine thread took to learn what constraints allow."""
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    """By who has guessed."""
    draft_lengths: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Guesses that were checked, by who has guessed and how many of their tokens were right."""
    draft_seconds: float = 0.0
    """What the rows of guesses have taken, by the measured costs of steps: calculated."""
    prefix_misses: Mapping[MissReason, int] = field(default_factory=dict)
    """Requests by why their prefix hit ended. Clients can read this, so a block known under another
    salt counts as new."""


@dataclass
class Counts:
    """The rising part of EngineStats; written by the engine thread alone."""

    prefilled: int = 0
    decoded: int = 0
    recomputed: int = 0
    steps: int = 0
    rows: int = 0
    masks: int = 0
    mask_s: float = 0.0
    missed: Counter[MissReason] = field(default_factory=Counter)
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0)
    )

    def count_admitted(self, request: Request) -> None:
        if request.miss:
            self.missed["new" if request.miss.reason == "salt" else request.miss.reason] += 1

    def timed_mask(self, constraint: Constraint) -> Allowed:
        start_s = time.perf_counter()
        allowed = constraint.allowed()
        self.mask_s += time.perf_counter() - start_s
        self.masks += 1
        return allowed

    def count_step(self, granted: Iterable[Scheduled]) -> None:
        """To be called before the step is committed."""
        self.steps += 1
        for item in granted:
            request = item.request
            start, end = request.n_computed, request.n_computed + item.n_rows
            self.rows += item.n_rows
            again_until = min(end, request.n_ever_computed)
            n_again = max(0, again_until - start)
            self.recomputed += n_again
            request.n_recomputed += n_again
            request.n_prefill_steps += request.n_output == 0
            self.prefilled += max(0, min(end, request.n_prompt) - max(start, again_until))


def snapshot(
    scheduler: Scheduler, counts: Counts, n_unfinished: int, of_guesses: Mapping[str, Any]
) -> EngineStats:
    """n_unfinished: accepted requests. of_guesses: the fields that tell of them."""
    pool = scheduler.pool
    running = len(scheduler.running)
    return EngineStats(
        running=running,
        waiting=max(0, n_unfinished - running),
        blocks_total=pool.n_blocks,
        block_tokens=pool.block_tokens,
        blocks_used=pool.n_held,
        blocks_cached=pool.n_cached,
        tokens_prefilled=counts.prefilled,
        tokens_decoded=counts.decoded,
        tokens_cached=scheduler.n_cached_tokens,
        tokens_recomputed=counts.recomputed,
        steps=counts.steps,
        rows=counts.rows,
        preemptions=scheduler.n_preemptions,
        finished=dict(counts.finished),
        blocks_shared=pool.n_shared,
        window_blocks_total=pool.parts.n_parts if pool.parts else 0,
        window_blocks_used=pool.parts.n_needed if pool.parts else 0,
        fragmentation=scheduler.fragmentation(),
        prefix_misses=dict(counts.missed),
        masks=counts.masks,
        mask_seconds=counts.mask_s,
        **of_guesses,
    )
