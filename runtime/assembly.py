"""The scheduler and the pool that fit an executor.

Owns: which of the pool's parts a model needs, and what of the caller's wishes cannot be had. Must
not know: requests, steps, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from .errors import ModelError, UnsupportedError
from .executors import Executor
from .kv_blocks import BlockPool
from .prefix_store import DiskTier, PrefixStore, SavingExecutor
from .prompt_scores import scored_rows
from .scheduler import Scheduler
from .state_slots import StateSlots


def scheduler_for(
    executor: Executor,
    vocab_size: int,
    *,
    max_running: int,
    step_rows: int | None,
    prompt_rows: Callable[[int, int], int],
    prefix_reuse: bool,
    fingerprint: bytes,
    tier: DiskTier | None,
    state_every: int,
) -> Scheduler:
    """With a pool over all of the executor's blocks. step_rows None: as many as it takes.
    fingerprint: seeds the prefixes, unless the tier has its own. Raises ModelError where the
    numbers leave no room."""
    if max_running < 1 or (step_rows or 1) < 1:
        raise ModelError(f"max_running {max_running} and step_rows {step_rows} must be at least 1")
    step_rows = min(step_rows or executor.max_rows, executor.max_rows)
    states = None
    if executor.n_states:
        states = StateSlots(executor.n_states, executor.copy_state, state_every, executor.n_guesses)
        max_running = min(max_running, executor.n_states)
    pool = BlockPool(
        executor.n_blocks,
        executor.block_tokens,
        prefix_reuse=prefix_reuse and not executor.sees_ahead,
        fingerprint=tier.store.fingerprint if tier else fingerprint,
        tier=tier,
        window=executor.window,
        n_window_blocks=executor.n_window_blocks,
        states=states,
    )
    alone = executor.n_blocks * executor.block_tokens
    if pool.parts and not pool.parts.fits(pool.parts.share(alone), step_rows):
        raise ModelError(
            f"{executor.n_window_blocks} window blocks are too few for one request and steps "
            f"of {step_rows} rows; give the KV pool more memory"
        )
    return Scheduler(
        pool,
        step_rows=step_rows,
        max_running=max_running,
        prompt_rows=prompt_rows,
        scored_rows=scored_rows(vocab_size),
        whole_prompts=executor.sees_ahead,
        copy_block=executor.copy_block,
    )


def tier_over(executor: Executor, store: PrefixStore | None) -> DiskTier | None:
    """The executor's blocks on disk, where there is a store. Raises UnsupportedError."""
    if store is None:
        return None
    if executor.sees_ahead:
        raise UnsupportedError(
            "a model whose tokens see those after them cannot keep prefixes: with another end "
            "they are others; leave the folder out"
        )
    if executor.n_states:
        raise UnsupportedError(
            "a model with recurrent layers cannot keep prefixes on disk: their states are "
            "not saved; leave the folder out"
        )
    return DiskTier(store, cast(SavingExecutor, executor))
