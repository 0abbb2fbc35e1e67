"""Random arrivals, cancellations, chunks and pools: every answer is the one it would be alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from martlet.runtime.block_table import BlockTable
from martlet.runtime.sampling import SamplingParams, sample
from martlet.runtime.service import Service
from martlet.runtime.step import Step
from martlet.runtime.window_parts import window_blocks

from .harness import Answer, engine_of, run_all
from .scripted import EOS, EOT, hashed_logits

SCRIPT = hashed_logits()


def alone(prompt: list[int], params: SamplingParams, seed: int, n_total: int) -> list[int]:
    """The output by the law itself: no engine, no pool, no steps."""
    tokens = list(prompt)
    while len(tokens) < n_total and not (len(tokens) > len(prompt) and tokens[-1] in (EOS, EOT)):
        history = np.array(tokens, np.int32)
        token = sample(SCRIPT(history), params, seed=seed, n_prompt=len(prompt), tokens=history)
        tokens.append(token)
    return tokens[len(prompt) :]


CONTEXT = 40


@dataclass(frozen=True)
class Visit:
    prompt: list[int]
    params: SamplingParams
    arrives_at: int
    cancelled_at: int | None
    service: Service


VISITS = st.builds(
    Visit,
    prompt=st.one_of(  # prefixes meet often
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=16),
        st.integers(1, 20).map(lambda n: [1] * n),
    ),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 20]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 30),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
    ),
    arrives_at=st.integers(0, 12),
    cancelled_at=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
    service=st.sampled_from(["interactive", "interactive", "background"]),
)


@given(
    visits=st.lists(VISITS, min_size=3, max_size=10),
    block_tokens=st.integers(1, 6),
    n_spare_blocks=st.integers(0, 3),
    step_rows=st.integers(1, 20),
    max_running=st.integers(1, 8),
    prefix_reuse=st.booleans(),
    window=st.sampled_from([0, 1, 2, 5, 12, 40]),
    n_spare_parts=st.integers(0, 4),
    n_states=st.sampled_from([0, 0, 1, 2, 4, 9]),
    state_every=st.sampled_from([6, 60]),
)
@settings(max_examples=200, deadline=None)
def test_every_answer_is_the_one_it_would_be_alone(
    visits: list[Visit],
    block_tokens: int,
    n_spare_blocks: int,
    prefix_reuse: bool,
    window: int,
    n_spare_parts: int,
    n_states: int,
    state_every: int,
    **limits: int,
) -> None:
    def writes_only_own_blocks(step: Step) -> None:
        for seq, (start, end) in enumerate(zip(step.seq_start, step.seq_start[1:], strict=False)):
            for place in {int(p) // block_tokens for p in step.positions[start:end]}:
                block = int(step.block_table[seq, place])
                assert engine.scheduler.pool.is_writable(BlockTable(blocks=[block]), 0)

    n_blocks = -(-CONTEXT // block_tokens) + n_spare_blocks
    least_parts = window_blocks(window, block_tokens) + -(-limits["step_rows"] // block_tokens)
    engine, executor = engine_of(
        SCRIPT,
        context=CONTEXT,
        prefix_reuse=prefix_reuse,
        executor={
            "block_tokens": block_tokens,
            "n_blocks": n_blocks,
            "window": window,
            "n_window_blocks": min(n_blocks, least_parts + n_spare_parts),
            "n_states": n_states,
        },
        state_every=state_every,
        **limits,
    )
    executor.on_step = writes_only_own_blocks
    answers = [Answer() for _ in visits]
    for now in range(31):
        for i, (visit, answer) in enumerate(zip(visits, answers, strict=True)):
            if visit.arrives_at == now:
                engine.submit(
                    visit.prompt, visit.params, answer, request_id=str(i), service=visit.service
                )
            if visit.cancelled_at == now:
                engine.cancel(str(i))
        engine.step()
        engine.scheduler.check()
        for visit, answer in zip(visits, answers, strict=True):
            if visit.cancelled_at == now >= visit.arrives_at:
                assert answer.end, "cancelled in whatever state, seen in the next step"
    run_all(engine)
    for visit, answer in zip(visits, answers, strict=True):
        check_answer(visit, answer)
    stats = engine.stats()
    has_parts = engine.scheduler.pool.parts is not None
    event(f"preempted {stats.preemptions > 0}, cached {stats.tokens_cached > 0}, parts {has_parts}")
    event(f"states {n_states > 0}, cached {stats.tokens_cached > 0}")
    assert sum(stats.finished.values()) == len(visits)
    assert stats.finished["error"] == 0
    assert stats.tokens_decoded == sum(len(answer.ids) for answer in answers)
    assert (stats.running, stats.waiting) == (0, 0)


def check_answer(visit: Visit, answer: Answer) -> None:
    assert visit.params.seed is not None
    assert visit.params.max_tokens is not None
    n_total = min(CONTEXT, len(visit.prompt) + visit.params.max_tokens)
    expected = alone(visit.prompt, visit.params, visit.params.seed, n_total)
    if answer.finish.reason == "cancelled":
        assert answer.ids == expected[: len(answer.ids)]
    else:
        assert answer.ids == expected
        assert answer.finish.reason == ("stop" if expected[-1] in (EOS, EOT) else "length")
