"""Runs a plan with numba kernels: for machines where the native library is absent.

Owns: threads, the run of a step, and the KV pool's lifetime. Must not know: models, schedulers, or
what an op does. Everything is bound to arrays at load (numba_bind); a step is a list of calls.
Loading also compiles the kernels the plan needs and tells how long that took (`warm_up_ms`); numba
keeps the machine code on disk, so the next process loads it in a fraction of the time.
"""

from __future__ import annotations

import os
import threading
import time

import numba
import numpy as np

from ..errors import ModelError
from ..ops import BufferKind, KvType, OpKind
from ..plan import FLOAT_FORMATS, Op, Plan
from ..step import MOST_GUESSES, Step, check_adapters, check_given
from ..weights import WeightSource
from .numba_bind import Binder
from .numba_memory import Memory, Rows
from .numba_weights import LANES

_SPINS = "GOMP_SPINCOUNT"
_SPIN_SETTINGS = {_SPINS, "OMP_WAIT_POLICY"}  # with either, the user has decided
# One of numba's threading layers ends the process when two threads start parallel kernels.
_ONE_AT_A_TIME = threading.Lock()


def _start_threads() -> None:
    """Starts numba's threads, so that they wait briefly for work and then sleep.

    GNU OpenMP by default spins for milliseconds, which starves the very thread it waits for when
    another program has a core; it reads its environment once, when numba first loads it.
    """
    if _SPIN_SETTINGS & os.environ.keys():
        return
    os.environ[_SPINS] = "2000"  # about 0.1 ms
    try:
        numba.get_num_threads()
    finally:
        del os.environ[_SPINS]


class NumbaExecutor:
    name = "numba"

    def __init__(
        self,
        plan: Plan,
        weights: WeightSource,
        *,
        block_tokens: int = 32,
        n_blocks: int,
        kv_type: KvType = KvType.F16,
        n_threads: int | None = None,
        n_window_blocks: int | None = None,
        n_states: int = 1,
        n_guesses: int = MOST_GUESSES,
    ) -> None:
        if block_tokens % LANES:
            raise ModelError(f"blocks of {block_tokens} tokens; use a multiple of {LANES}")
        _start_threads()
        most = self.most_threads()
        if n_threads is not None and not 1 <= n_threads <= most:
            raise ModelError(f"{n_threads} threads; use 1 to {most}, or set NUMBA_NUM_THREADS")
        self.n_threads = n_threads or most
        self.max_rows = plan.max_rows
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self.n_window_blocks = n_window_blocks or n_blocks
        self.window = plan.window
        self.sees_ahead = plan.sees_ahead
        self.n_states, self.n_guesses = n_states if plan.states else 0, n_guesses
        self._logits = next((i for i, b in enumerate(plan.buffers) if b.is_logits), -1)
        self._vocab_size, self._n_adapters = plan.vocab_size, plan.n_adapters
        self._given_width = plan.given_width
        self._hidden, self.hidden = plan.hidden, np.empty((0, plan.hidden_width), np.float32)
        if any(_takes_other_rows(plan, op) for op in plan.ops):
            raise ModelError(
                "the numba executor rounds activations to int8; "
                "use native or reference for f32 and bf16"
            )
        if kv_type is KvType.Q8_0:
            raise ModelError("the numba executor has no q8_0 cache; use f16")
        self._memory = Memory.of(
            plan, block_tokens, n_blocks, self.n_window_blocks, self.n_states, n_guesses, kv_type
        )
        self._calls = Binder(plan, weights, self._memory, self.n_threads).calls()
        self.warm_up_ms = self._warm_up()
        """Milliseconds that loading spent on compiling kernels, or on reading compiled ones."""

    @staticmethod
    def most_threads() -> int:
        """Threads that numba started with: one per core, or NUMBA_NUM_THREADS."""
        return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]

    def run(self, step: Step) -> np.ndarray:
        if step.n_rows > self.max_rows:
            raise ModelError(f"a step of {step.n_rows} rows, at most {self.max_rows}")
        check_adapters(step, self._n_adapters)
        check_given(step, self._given_width)
        logits = np.empty((step.n_out, self._vocab_size), np.float32)
        with _ONE_AT_A_TIME:
            if self._logits >= 0:
                self._memory.floats[self._logits] = logits
            numba.set_num_threads(self.n_threads)  # holds for the calling thread only
            rows = Rows.of(step, self.block_tokens)
            for call in self._calls:
                call(rows)
            if self._hidden >= 0:
                self.hidden = self._memory.floats[self._hidden][: step.n_hidden].copy()
        return logits

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        memory = self._memory
        for pools in (memory.keys, memory.values):
            for pool, is_windowed in zip(pools, memory.is_windowed, strict=True):
                from_block, to_block = window if window and is_windowed else (src, dst)
                blocks = pool.reshape(self.n_window_blocks if is_windowed else self.n_blocks, -1)
                blocks[to_block] = blocks[from_block]

    def copy_state(self, src: int, dst: int) -> None:
        for states in self._memory.states:
            states[dst] = states[src]

    def close(self) -> None:
        self._calls.clear()
        self._memory.keys.clear()
        self._memory.values.clear()
        self._memory.states.clear()
        self._memory.guesses.clear()

    def _warm_up(self) -> float:
        began = time.perf_counter()
        one, none = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        shares = np.ones((1, self._n_adapters), np.float32)
        given, start = np.zeros((1, self._given_width), np.float32), np.array([0, 1], np.int32)
        self.run(Step(one, one, start, none, one, adapters=shares, given=given))
        return (time.perf_counter() - began) * 1e3


_PRODUCTS = (
    OpKind.LINEAR,
    OpKind.LINEAR_GLU,
    OpKind.EXPERT_GLU,
    OpKind.EXPERT_SUM,
    OpKind.HEAD_LINEAR,
)


def _takes_other_rows(plan: Plan, op: Op) -> bool:
    """Whether the op is a product that the kernels here do not have: of BF16 rows with anything, or
    of F32 rows with blocks."""
    if op.kind not in _PRODUCTS:
        return False
    kind = plan.buffers[op.inputs[0]].kind
    in_blocks = any(plan.tensors[w].format not in FLOAT_FORMATS for w in op.weights[:2] if w >= 0)
    return kind is BufferKind.BF16 or (kind is BufferKind.F32 and in_blocks)
