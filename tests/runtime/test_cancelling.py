"""Cancelled in any state, a request ends in the next step and its blocks are free for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from martlet.runtime.errors import RequestError
from martlet.runtime.request import State
from martlet.runtime.sampling import sample
from martlet.runtime.sampling_params import SamplingParams

from .harness import ask, engine_of, run_all

EXECUTOR: dict[str, Any] = {"block_tokens": 4, "n_blocks": 10}


def held_by(engine: Any) -> int:
    held: int = engine.stats().blocks_used
    return held


def test_cancelled_while_preempted() -> None:
    """B88: it owns tokens and no blocks, and waits at the front of the queue."""
    engine, _ = engine_of(executor=EXECUTOR)
    old, young = (ask(engine, [i] * 8, max_tokens=16, request_id=str(i)) for i in (1, 2))
    while not engine.stats().preemptions:
        engine.step()
    (waiting,) = engine.scheduler.waiting
    assert (waiting.id, waiting.state, waiting.n_output > 0) == ("2", State.WAITING, True)
    engine.cancel("2")
    engine.step()
    assert young.finish.reason == "cancelled"
    assert young.finish.n_output == len(young.ids) > 0
    run_all(engine)
    assert old.finish.n_output == 16


@pytest.mark.parametrize("n_steps", [0, 1, 2, 4, 9])
def test_cancelled_before_in_and_after_its_prompt(n_steps: int) -> None:
    engine, executor = engine_of(executor={**EXECUTOR, "n_blocks": 40}, step_rows=8)
    answer = ask(engine, [1] * 30, request_id="a")
    for _ in range(n_steps):
        engine.step()
    assert (held_by(engine) > 0) == (n_steps > 0)
    engine.cancel("a")
    engine.step()
    assert answer.finish.reason == "cancelled"
    assert held_by(engine) == 0
    assert len(executor.steps) == n_steps


@pytest.mark.parametrize("is_twin", [False, True])
def test_cancelled_while_it_waits_for_what_another_computes(is_twin: bool) -> None:
    engine, _ = engine_of(executor={**EXECUTOR, "n_blocks": 40}, step_rows=8)
    prompt = [1] * 30
    first = ask(engine, prompt, max_tokens=3)
    second = ask(engine, prompt if is_twin else [*prompt, 2], request_id="b")
    engine.step()
    assert engine.stats().running == 1
    engine.cancel("b")
    engine.step()
    assert second.finish.reason == "cancelled"
    run_all(engine)
    assert first.finish.n_output == 3


def test_b104_off_values_are_off_and_others_are_refused() -> None:
    logits = np.zeros(8, np.float32)
    empty = np.array([1], np.int32)

    def drawn(**params: Any) -> set[int]:
        chosen = SamplingParams(temperature=1.0, **params)
        return {sample(logits, chosen, seed=s, n_prompt=1, tokens=empty) for s in range(1000)}

    every = set(range(8))
    assert drawn(top_k=0) == drawn(top_k=100) == drawn(top_p=1.0) == drawn(min_p=0.0) == every
    assert len(drawn(top_p=0.0)) == 1
    for field, bad in (("top_k", -1), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 1.1)):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: bad})
