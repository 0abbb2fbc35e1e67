"""The engine over the native executor: whatever the schedule, each request's logits are bit-equal
to those it has alone."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from martlet.runtime.engine import Engine
from martlet.runtime.events import Event
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.ops import KvType
from martlet.runtime.prefix_store import PrefixStore
from martlet.runtime.sampling import SamplingParams
from martlet.runtime.window_parts import window_blocks

from ..recorded import recorded_model
from .guessing import always
from .harness import Answer, run_all
from .native_library import IS_SANITIZED  # skips the file where there is no native library
from .scripted import ScriptedTokenizer
from .tiny import TinyDims, TinyModel, tiny_model

RECURRENT = ("lfm2", "qwen35", "granitehybrid", "falcon-h1")
# Checkpoints whose layers differ from those of the tiny models in what a row's neighbours could
# disturb: states, windows of all or some layers, layers without rope, norms of whole rows,
# temperatures, soft caps, compressed keys, sinks, keys of other layers, heads of two sizes.
RECORDED = (
    *("cohere2", "deepseek2", "exaone4", "gemma2", "gpt-oss", "mistral3", "olmo3", "phi3"),
    *("smollm3", "gemma4", "gemma4-shared"),
    *RECURRENT,
)
BLOCK, CONTEXT, N_OUTPUT = 16, 144, 20
DIMS = TinyDims(dim=64, ffn_dim=128, heads=4, kv_heads=2, head_dim=16, vocab_size=260)
SYSTEM = [(7 * i) % 250 for i in range(90)]


@cache
def model_of(arch: str) -> TinyModel:
    if arch in RECORDED:
        return TinyModel(*recorded_model(arch, "Q8_0"))
    return tiny_model(arch, formats=("Q4_0", "Q8_0"), dims=DIMS)


def executor_of(
    arch: str,
    kv_type: KvType,
    n_blocks: int,
    n_threads: int,
    n_window_blocks: int | None = None,
    n_states: int = 1,
) -> NativeExecutor:
    model = model_of(arch)
    return NativeExecutor(
        model.plan(32),
        model.weights,
        block_tokens=BLOCK,
        n_blocks=n_blocks,
        kv_type=kv_type,
        n_threads=n_threads,
        n_window_blocks=n_window_blocks,
        n_states=n_states,
    )


def recorded(engine: Engine) -> dict[str, list[bytes]]:
    """The logits behind every token drawn from now on, by request."""
    seen: dict[str, list[bytes]] = {}
    advance = engine._advance

    def recording(request: Any, logits: np.ndarray, best_id: int, guess: Any) -> int:
        seen.setdefault(request.id, []).append(logits.tobytes())
        return advance(request, logits, best_id, guess)

    engine._advance = recording  # type: ignore[method-assign]
    return seen


def solo(arch: str, kv_type: KvType, prompt: tuple[int, ...]) -> list[bytes]:
    return alone(arch, kv_type, prompt)[0]


@cache
def alone(arch: str, kv_type: KvType, prompt: tuple[int, ...]) -> tuple[list[bytes], list[int]]:
    """Logits behind each token, and the tokens."""
    engine = Engine(
        executor_of(arch, kv_type, 32, 1),
        ScriptedTokenizer(eog_ids=()),
        context=CONTEXT,
        prefix_reuse=False,
    )
    seen = recorded(engine)
    answer = submit(engine, "solo", prompt)
    run_all(engine)
    return seen["solo"], answer.ids


def submit(engine: Engine, name: str, prompt: tuple[int, ...], **options: Any) -> Answer:
    params, answer = (
        SamplingParams(temperature=0.7, seed=len(prompt), max_tokens=N_OUTPUT),
        Answer(),
    )
    engine.submit(prompt, params, answer, request_id=name, **options)
    return answer


PROMPTS = st.builds(
    lambda common, own, n: (*SYSTEM[:common], *[own] * n),
    st.one_of(st.integers(0, 90), st.sampled_from([16, 48, 80])),
    st.integers(0, 3),
    st.integers(1, 18),
)


@given(
    arch=st.sampled_from(["llama", "gemma3", "qwen3moe", *RECORDED]),
    kv_type=st.sampled_from([KvType.F16, KvType.Q8_0]),
    visits=st.lists(
        st.tuples(PROMPTS, st.integers(0, 8), st.sampled_from([None, None, None, 1, 4, 9])),
        min_size=1,
        max_size=16,
    ),
    n_blocks=st.integers(CONTEXT // BLOCK, 24),
    n_threads=st.integers(1, 4),
    step_rows=st.integers(1, 32),
    n_spare_parts=st.sampled_from([0, 1, 4, None]),
    n_states=st.sampled_from([1, 2, 5, 20]),
    is_kept=st.booleans(),
    is_background=st.booleans(),
    guesses=st.sampled_from([None, None, (1, 1.0), (3, 0.5), (5, 0.9)]),
)
@settings(
    max_examples=3 if IS_SANITIZED else 60,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_logits_are_those_of_a_solo_run(
    tmp_path: Path,
    arch: str,
    kv_type: KvType,
    visits: list[tuple[tuple[int, ...], int, int | None]],
    n_blocks: int,
    n_threads: int,
    step_rows: int,
    n_spare_parts: int | None,
    n_states: int,
    is_kept: bool,
    is_background: bool,
    guesses: tuple[int, float] | None,
) -> None:
    """Two lives: the second finds the first one's prefixes on disk, if they are kept."""
    n_parts = None
    if n_spare_parts is not None:
        least_parts = window_blocks(DIMS.window, BLOCK) + -(-step_rows // BLOCK)
        n_parts = min(n_blocks, least_parts + n_spare_parts)
    speculation = None
    if guesses:
        outputs = {str(i): alone(arch, kv_type, visit[0])[1] for i, visit in enumerate(visits)}
        speculation = always(guesses[0], outputs, guesses[1])
    for life in range(2):
        executor = executor_of(arch, kv_type, n_blocks, n_threads, n_parts, n_states)
        key = f"{arch} {kv_type.name}".encode()
        is_saved = is_kept and arch not in RECURRENT
        store = PrefixStore(tmp_path, key, max_bytes=200_000) if is_saved else None
        engine = Engine(
            executor,
            ScriptedTokenizer(eog_ids=()),
            context=CONTEXT,
            step_rows=step_rows,
            prefix_store=store,
            state_every=32,
            speculation=speculation,
        )
        seen = recorded(engine)
        for now in range(10):
            for i, (prompt, arrives_at, cancelled_at) in enumerate(visits):
                if arrives_at == now:
                    service = "background" if is_background and i % 2 else "interactive"
                    submit(engine, str(i), prompt, service=service)
                if cancelled_at == now:
                    engine.cancel(str(i))
            engine.step()
            engine.scheduler.check()
        run_all(engine)
        stats = engine.stats()
        event(f"preempted {stats.preemptions > 0}, cached {stats.tokens_cached > 0}, life {life}")
        engine.close()
        executor.close()
        assert stats.finished["error"] == 0
        for i, (prompt, _, cancelled_at) in enumerate(visits):
            expected, got = solo(arch, kv_type, prompt), seen.get(str(i), [])
            assert got == expected[: len(got)], f"request {i} has other logits than alone"
            assert cancelled_at is not None or len(got) == N_OUTPUT


def test_b90_cancelled_and_asked_again_at_once() -> None:
    """200 times, while the native library computes in the engine's thread."""
    executor = executor_of("llama", KvType.F16, 32, 2)
    engine = Engine(executor, ScriptedTokenizer(eog_ids=()), context=CONTEXT)
    prompt, expected = tuple(SYSTEM[:40]), alone("llama", KvType.F16, tuple(SYSTEM[:40]))[1]
    engine.start()
    try:
        for i in range(200):
            begun, done, again = threading.Event(), threading.Event(), Answer()

            def start(event: Event, begun: threading.Event = begun) -> None:
                begun.set()

            def finish(event: Event, again: Answer = again, done: threading.Event = done) -> None:
                again(event)
                if again.end:
                    done.set()

            params = SamplingParams(temperature=0.7, seed=len(prompt), max_tokens=N_OUTPUT)
            engine.submit(prompt, params, start, request_id=f"cancelled {i}")
            assert begun.wait(30)
            engine.cancel(f"cancelled {i}")
            engine.submit(prompt, params, finish)
            assert done.wait(30)
            assert again.ids == expected
    finally:
        engine.close()
        executor.close()
